"""Happens-before over a schedule, by vector clocks: one counter a lane."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from perf_model.schedule.action import Action, ActionKind, Lane
from perf_model.schedule.placement import Placement

Clock = tuple[int, ...]
"""How many actions of each lane have surely finished, in the order of ``Lane``."""

_INDEX = {lane: index for index, lane in enumerate(Lane)}


class Clocks:
    """Vector clocks of actions, issued one by one.

    Two rules order actions, both those of streams and events: a lane runs its actions in issue order, and an
    action starts after every action that it waits for. That the host, too, may block while it issues is not
    relied upon.
    """

    def __init__(self) -> None:
        self._finished: dict[str, Clock] = {}
        self._lane_clock: dict[Lane, Clock] = dict.fromkeys(Lane, (0,) * len(Lane))

    def issue(self, action: Action, start: Clock) -> None:
        """``start``: what ``before`` says of it and its waits."""
        index = _INDEX[action.lane]
        clock = (*start[:index], start[index] + 1, *start[index + 1 :])
        self._finished[action.name] = clock
        self._lane_clock[action.lane] = clock

    def before(self, action: Action, waits: Iterable[str] = ()) -> Clock:
        """The clock at which ``action``, issued now with these waits, would start.

        Waits must name actions issued before: an event not yet recorded holds nobody back.
        """
        clock = self._lane_clock[action.lane]
        for name in waits:
            clock = tuple(map(max, clock, self._finished[name]))
        return clock

    def issued(self, name: str) -> bool:
        return name in self._finished

    def finished_by(self, clock: Clock, producer: Action) -> bool:
        """Whether ``producer`` has surely finished at ``clock``."""
        finished = self._finished.get(producer.name)
        index = _INDEX[producer.lane]
        return finished is not None and clock[index] >= finished[index]


CHAINS: dict[Placement, tuple[ActionKind, ...]] = {
    Placement.CPU: (ActionKind.CPU_STEP, ActionKind.PUBLISH),
    Placement.STREAMED: (ActionKind.PREFETCH, ActionKind.GPU_STEP, ActionKind.FLUSH_STATES),
    Placement.RESIDENT: (ActionKind.GPU_STEP,),
}
"""The actions of one sub-group by placement; each reads what the one before it wrote."""


def dependencies(actions: Sequence[Action]) -> dict[str, tuple[Action, ...]]:
    """By action name, the actions that must have finished before it starts, of a well-formed schedule.

    The predecessor in the sub-group's chain; and for a PREFETCH the FLUSH_STATES of the slot's previous
    occupant, which still reads what the prefetch overwrites.
    """
    by_name = {action.name: action for action in actions}
    latest: dict[int, Action] = {}
    occupant: dict[int, Action] = {}
    needs: dict[str, tuple[Action, ...]] = {}
    for action in actions:
        required = [latest[action.sub_group]] if action.sub_group in latest else []
        latest[action.sub_group] = action
        if action.kind is ActionKind.PREFETCH and action.slot is not None:
            if action.slot in occupant:
                required.append(by_name[f"{ActionKind.FLUSH_STATES.value} {occupant[action.slot].sub_group}"])
            occupant[action.slot] = action
        needs[action.name] = tuple(required)
    return needs
