"""Update streamed units in backward, through slots, for the step that is likely to follow.

Slots are used in the order of the schedule, so a unit whose gradients are complete waits for the units before it.
Prefetches of other units follow into free slots.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import takewhile
from typing import Any

from deep_opt_states.device.interface import Event, Stream
from perf_model.schedule.action import Action, ActionKind
from perf_model.schedule.schedule import Schedule

OF_SLOTS = (ActionKind.PREFETCH, ActionKind.GPU_SPECULATE, ActionKind.FLUSH_STATES, ActionKind.GPU_STEP)


class EarlyUnits:
    """The streamed eager units of one schedule, updated on ``compute``. ``issue`` issues an action once."""

    def __init__(self, compute: Stream[Any], issue: Callable[[Action], None]) -> None:
        self._compute, self._issue = compute, issue
        self._actions: list[Action] = []
        """The actions that may run in backward: those before the first step that may not."""
        self.restart()

    def set_schedule(self, schedule: Schedule) -> None:
        """Update the units of ``schedule`` from now on. None is speculated."""
        of_slots = (action for action in schedule.actions if action.kind in OF_SLOTS)
        self._actions = list(takewhile(lambda action: action.kind is not ActionKind.GPU_STEP, of_slots))
        self.restart()

    @property
    def speculated(self) -> set[int]:
        """Return the units whose steps were issued for the next update."""
        issued = self._actions[: self._issued]
        return {action.unit for action in issued if action.kind is ActionKind.GPU_SPECULATE}

    @property
    def names(self) -> set[str]:
        """Return the names of the actions that may run in backward."""
        return {action.name for action in self._actions}

    def speculate(self, unit: int, reduced: Event) -> None:
        """Issue the actions up to the first step of a unit whose gradients are not complete, as ``unit``'s are now."""
        self._reduced[unit] = reduced
        for action in self._actions[self._issued :]:
            if action.kind is ActionKind.GPU_SPECULATE:
                if action.unit not in self._reduced:
                    break
                self._compute.wait(self._reduced[action.unit])
            self._issue(action)
            self._issued += 1

    def leave_out(self, units: Collection[int]) -> None:
        """Issue no step of ``units``, which are not speculated, before the next update starts."""
        for unit in units:
            self._reduced.pop(unit, None)

    def restart(self) -> None:
        """Start with the update after the next one, or issue all actions again."""
        self._reduced: dict[int, Event] = {}
        """The caller's stream -> compute stream, by unit: its gradients are complete."""
        self._issued = 0
