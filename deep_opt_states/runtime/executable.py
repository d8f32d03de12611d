"""Check that a schedule is safe, and that streams and one worker can execute it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from deep_opt_states.runtime.state import UnitState
from perf_model.schedule.action import ActionKind, Lane
from perf_model.schedule.check import ScheduleError, check, check_next_update
from perf_model.schedule.schedule import Schedule
from perf_model.schedule.slots import in_vain
from perf_model.schedule.workload import Workload


def check_executable(schedule: Schedule, states: Sequence[UnitState]) -> None:
    """Raise ``ScheduleError`` if ``schedule`` is not safe for ``states`` and their placements, or cannot be executed.

    A stream can wait only for an event that was recorded before. So only publications may wait for the worker, each for
    the step or the COMMIT of its own unit, and the worker issues them. A thread can wait for anything.
    """
    units = Workload.from_numels(state.length for state in states).units
    workload = Workload(
        tuple(replace(unit, is_on_disk=state.disk is not None) for unit, state in zip(units, states, strict=True))
    )
    placements = check(schedule, workload)
    if schedule.adopts:
        other = in_vain(schedule)
        check(other, workload)
        # Its last ADOPT waits for all flushes, so that the next update need not.
        check_next_update(other, {})
    of_cpu_units = {action.name for action in schedule.actions if action.lane in (Lane.CPU, Lane.PUBLISH)}
    for action in schedule.actions:
        if action.lane.is_thread:
            continue
        before = ActionKind.COMMIT if states[action.unit].shadow else ActionKind.CPU_STEP
        expected = [f"{before.value} {action.unit}"] if action.kind is ActionKind.PUBLISH else []
        found = [name for name in action.waits if name in of_cpu_units]
        if found != expected:
            rule = f"PUBLISH waits for the {before.value} of its unit, and no other action waits for a CPU unit."
            raise ScheduleError(schedule, action, rule)
    assert placements == tuple(state.placement for state in states), placements
