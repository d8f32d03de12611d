"""Define ``Schedule``, the actions of one update as a value that is executed, simulated, checked and drawn."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from perf_model.schedule.action import Action, ActionKind

PUBLISHING = (ActionKind.GPU_STEP, ActionKind.PUBLISH, ActionKind.ADOPT)
"""The kinds of action that write 16-bit parameters. Each unit has exactly one such action."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The actions in issue order, the slots, each of ``slot_numel`` parameters, and the number of disk slots."""

    num_slots: int
    slot_numel: int
    actions: tuple[Action, ...]
    num_disk_slots: int = 0

    @cached_property
    def publishing(self) -> dict[int, int]:
        """Return by unit the position of the action that writes its parameters."""
        return {action.unit: position for position, action in enumerate(self.actions) if action.kind in PUBLISHING}

    @cached_property
    def adopts(self) -> frozenset[int]:
        """Return the units that are streamed and eager, whose parameters are flushed with their states."""
        return frozenset(action.unit for action in self.actions if action.kind is ActionKind.ADOPT)

    def __str__(self) -> str:
        header = f"schedule slots {self.num_slots} slot_numel {self.slot_numel}"
        return "\n".join([header, *map(str, self.actions)])
