"""Happens-before over a schedule, by vector clocks: one counter a lane."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from perf_model.action import Action, Lane

Clock = Mapping[Lane, int]
"""How many actions of each lane have surely finished."""


class Clocks:
    """Vector clocks of actions, issued one by one.

    Two rules order actions, both those of streams and events: a lane runs its actions in issue order, and an
    action starts after every action that it waits for. That the host, too, may block while it issues is not
    relied upon.
    """

    def __init__(self) -> None:
        self._finished: dict[str, dict[Lane, int]] = {}
        self._lane_clock: dict[Lane, dict[Lane, int]] = {lane: {} for lane in Lane}

    def issue(self, action: Action) -> None:
        """Waits must name actions issued before: an event not yet recorded holds nobody back."""
        clock = self.before(action, action.waits)
        clock[action.lane] = clock.get(action.lane, 0) + 1
        self._finished[action.name] = clock
        self._lane_clock[action.lane] = clock

    def before(self, action: Action, waits: Iterable[str]) -> dict[Lane, int]:
        """The clock at which ``action``, issued now with these waits, would start."""
        clock = dict(self._lane_clock[action.lane])
        for name in waits:
            for lane, count in self._finished[name].items():
                clock[lane] = max(clock.get(lane, 0), count)
        return clock

    def issued(self, name: str) -> bool:
        return name in self._finished

    def finished_by(self, clock: Clock, producer: Action) -> bool:
        """Whether ``producer`` has surely finished at ``clock``."""
        if producer.name not in self._finished:
            return False
        return clock.get(producer.lane, 0) >= self._finished[producer.name][producer.lane]
