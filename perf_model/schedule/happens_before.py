"""Relate the actions of a schedule by happens-before: the required order, and the guaranteed order.

``CHAINS`` and ``dependencies`` give the required order. ``Clocks`` gives the guaranteed order, by vector clocks with
one counter per lane. ``lowering`` adds waits until the guaranteed order includes the required one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from perf_model.schedule.action import Action, ActionKind, Lane
from perf_model.schedule.placement import Placement

CHAINS: dict[Placement, tuple[ActionKind, ...]] = {
    Placement.CPU: (ActionKind.CPU_STEP, ActionKind.PUBLISH),
    Placement.STREAMED: (ActionKind.PREFETCH, ActionKind.GPU_STEP, ActionKind.FLUSH_STATES),
    Placement.RESIDENT: (ActionKind.GPU_STEP,),
}
"""The actions of one unit by placement. Each reads the output of the one before."""

EAGER_CHAINS: dict[Placement, tuple[ActionKind, ...]] = {
    Placement.CPU: (ActionKind.SPECULATE, ActionKind.COMMIT, ActionKind.PUBLISH),
    Placement.STREAMED: (ActionKind.PREFETCH, ActionKind.GPU_SPECULATE, ActionKind.FLUSH_STATES, ActionKind.ADOPT),
}
"""The actions of a unit that is eager: its states have two versions."""

DISK_CHAIN = (ActionKind.READ, ActionKind.CPU_STEP, ActionKind.PUBLISH, ActionKind.WRITE)
"""The actions of a unit on disk. Its write waits for its publication, which may read the masters in the disk slot."""

EMPTIED_BY = {ActionKind.PREFETCH: ActionKind.FLUSH_STATES, ActionKind.READ: ActionKind.WRITE}
"""The action that empties a slot, by the action that fills it."""


def dependencies(actions: Sequence[Action]) -> dict[str, tuple[Action, ...]]:
    """Return by action name the actions that it must start after: the one before in its chain, and in its slot."""
    by_name = {action.name: action for action in actions}
    latest: dict[int, Action] = {}
    occupant: dict[tuple[ActionKind, int], Action] = {}
    needs: dict[str, tuple[Action, ...]] = {}
    for action in actions:
        required = [latest[action.unit]] if action.unit in latest else []
        latest[action.unit] = action
        if action.kind in EMPTIED_BY and action.slot is not None:
            slot = action.kind, action.slot
            if slot in occupant:
                required.append(by_name[f"{EMPTIED_BY[action.kind].value} {occupant[slot].unit}"])
            occupant[slot] = action
        needs[action.name] = tuple(required)
    return needs


Clock = tuple[int, ...]
"""The number of actions of each lane that have certainly finished."""

_INDEX = {lane: index for index, lane in enumerate(Lane)}


class Clocks:
    """The vector clocks of actions that are issued one by one, by the rules of streams and events."""

    def __init__(self) -> None:
        self._finished: dict[str, Clock] = {}
        self._lane_clock: dict[Lane, Clock] = dict.fromkeys(Lane, (0,) * len(Lane))

    def issue(self, action: Action, start: Clock) -> None:
        """Record that ``action`` is issued, with the result of ``start_clock`` as ``start``."""
        index = _INDEX[action.lane]
        clock = (*start[:index], start[index] + 1, *start[index + 1 :])
        self._finished[action.name] = clock
        self._lane_clock[action.lane] = clock

    def start_clock(self, action: Action, waits: Iterable[str] = ()) -> Clock:
        """Return the clock at which ``action``, issued now with ``waits``, would start."""
        clock = self._lane_clock[action.lane]
        for name in waits:
            clock = tuple(map(max, clock, self._finished[name]))
        return clock

    def is_issued(self, name: str) -> bool:
        return name in self._finished

    def has_finished(self, producer: Action, clock: Clock) -> bool:
        """Return whether ``producer`` has certainly finished at ``clock``."""
        finished = self._finished.get(producer.name)
        index = _INDEX[producer.lane]
        return finished is not None and clock[index] >= finished[index]


def insert_waits(actions: Sequence[Action]) -> list[Action]:
    """Return the actions with a wait for each dependency that lane order and the earlier waits do not imply."""
    needs = dependencies(actions)
    clocks = Clocks()
    lowered = []
    for action in actions:
        waits: tuple[str, ...] = ()
        start = clocks.start_clock(action)
        # Start with the latest producer: its clock may cover the others.
        for producer in reversed(needs[action.name]):
            if not clocks.has_finished(producer, start):
                waits = (producer.name, *waits)
                start = clocks.start_clock(action, waits)
        clocks.issue(action, start)
        lowered.append(Action(action.kind, action.unit, action.slot, waits) if waits else action)
    return lowered
