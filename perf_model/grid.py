"""A schedule as text: one row an action in issue order, one column a lane."""

from __future__ import annotations

from perf_model.action import Action, Lane
from perf_model.schedule import Schedule


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
