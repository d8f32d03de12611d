"""A ``Schedule``: the actions of one update phase, as a value.

It is executed, simulated, checked and drawn; none of these adds a decision of its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from perf_model.schedule.action import Action, Lane

_HEADER = re.compile(r"schedule slots (?P<slots>\d+) slot_numel (?P<numel>\d+) staging_bytes (?P<bytes>\d+)")

STAGED_BYTES_PER_PARAM = 12
"""What a slot holds of a parameter: fp32 p, m and v. The gradient is on the accelerator already."""


def bytes_of_slots(num_slots: int, slot_numel: int) -> int:
    return num_slots * slot_numel * STAGED_BYTES_PER_PARAM


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Actions in the order the host issues them, and the staging memory they need.

    ``slot_numel`` is the length, in parameters, of each of the ``num_slots`` staging slots. ``staging_bytes`` is the
    accelerator memory that the schedule declares: the runtime reserves the slots in it, once, and nothing beside.
    The text form (``str``) reads back with ``parse``.
    """

    num_slots: int
    slot_numel: int
    staging_bytes: int
    actions: tuple[Action, ...]

    def __str__(self) -> str:
        header = f"schedule slots {self.num_slots} slot_numel {self.slot_numel} staging_bytes {self.staging_bytes}"
        return "\n".join([header, *map(str, self.actions)])

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """The inverse of ``str``. Raises ``ValueError`` for text that is no schedule."""
        header, *lines = text.strip().splitlines() or [""]
        match = _HEADER.fullmatch(header)
        if match is None:
            raise ValueError(
                f"A schedule starts with 'schedule slots N slot_numel M staging_bytes B'; found {header!r}."
            )
        return cls(
            num_slots=int(match["slots"]),
            slot_numel=int(match["numel"]),
            staging_bytes=int(match["bytes"]),
            actions=tuple(map(Action.parse, lines)),
        )


def grid(schedule: Schedule, failing: Action | None = None) -> str:
    """The grid; the row of ``failing`` (that very object) is marked with ``>``."""

    def cell(action: Action) -> str:
        return action.name if action.slot is None else f"{action.name} [{action.slot}]"

    width = max([len(cell(action)) for action in schedule.actions] + [len(lane.value) for lane in Lane])
    rows = ["  " + " ".join(["   #", *(lane.value.ljust(width) for lane in Lane), "after"])]
    for position, action in enumerate(schedule.actions):
        columns = [(cell(action) if action.lane is lane else "").ljust(width) for lane in Lane]
        mark = ">" if action is failing else " "
        rows.append(f"{mark} {' '.join([f'{position:4}', *columns, ', '.join(action.waits)])}".rstrip())
    return "\n".join(rows)
