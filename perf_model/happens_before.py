"""Happens-before over a schedule, by vector clocks: one counter a lane."""

from __future__ import annotations

from collections.abc import Iterable

from perf_model.action import Action, Lane

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
