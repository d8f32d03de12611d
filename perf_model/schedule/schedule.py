"""Define ``Schedule``, the actions of one update as a value that is executed, simulated, checked and drawn."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from perf_model.schedule.action import Action, ActionKind, Lane

PUBLISHING = (ActionKind.GPU_STEP, ActionKind.PUBLISH)
"""The kinds of action that write 16-bit parameters. Each unit has exactly one such action."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The actions in issue order, and the slots, each of ``slot_numel`` parameters."""

    num_slots: int
    slot_numel: int
    actions: tuple[Action, ...]

    @cached_property
    def publishing(self) -> dict[int, int]:
        """Return by unit the position of the action that writes its parameters."""
        return {action.unit: position for position, action in enumerate(self.actions) if action.kind in PUBLISHING}

    def __str__(self) -> str:
        header = f"schedule slots {self.num_slots} slot_numel {self.slot_numel}"
        return "\n".join([header, *map(str, self.actions)])


def format_grid(schedule: Schedule, failing: Action | None = None) -> str:
    """Return one row per action in issue order and one column per lane, with ``failing`` marked."""

    def cell(action: Action) -> str:
        return action.name if action.slot is None else f"{action.name} [{action.slot}]"

    width = max([len(cell(action)) for action in schedule.actions] + [len(lane.value) for lane in Lane])
    rows = ["  " + " ".join(["   #", *(lane.value.ljust(width) for lane in Lane), "after"])]
    for position, action in enumerate(schedule.actions):
        columns = [(cell(action) if action.lane is lane else "").ljust(width) for lane in Lane]
        mark = ">" if action is failing else " "
        rows.append(f"{mark} {' '.join([f'{position:4}', *columns, ', '.join(action.waits)])}".rstrip())
    return "\n".join(rows)
