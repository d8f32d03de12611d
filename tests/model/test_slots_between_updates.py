"""Check that the slots of consecutive updates are filled in the order in which they were emptied."""

from __future__ import annotations

import pytest
from hypothesis import given

from perf_model.schedule.action import ActionKind
from perf_model.schedule.check import ScheduleError, check, check_next_update
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.schedule import Schedule
from perf_model.schedule.slots_between_updates import flushes_before, slot_shift
from perf_model.schedule.workload import Workload
from tests.model.schedule_text import parse_schedule
from tests.model.strategies import plans, schedules_with_more_waits

STREAMED = Placement.STREAMED


def memory_of_units(schedule: Schedule, update: int) -> dict[int, int]:
    """Return the memory that each streamed unit uses in this update, as an index of slots, in the order of flushes."""
    return {
        action.unit: (action.slot + update * slot_shift(schedule)) % schedule.num_slots
        for action in schedule.actions
        if action.kind is ActionKind.FLUSH_STATES and action.slot is not None
    }


def test_five_units_in_three_slots() -> None:
    plan = UpdatePlan(workload=Workload.from_numels([4] * 5), placements=(STREAMED,) * 5, num_slots=3)
    assert [[*memory_of_units(plan.schedule, update).values()] for update in range(3)] == [
        [0, 1, 2, 0, 1],
        [2, 0, 1, 2, 0],
        [1, 2, 0, 1, 2],
    ]
    assert flushes_before(plan.schedule) == {
        "PREFETCH 0": "FLUSH_STATES 2",
        "PREFETCH 1": "FLUSH_STATES 3",
        "PREFETCH 2": "FLUSH_STATES 4",
    }


@given(plans(max_numel=300))
def test_prefetches_fill_slots_in_the_order_in_which_the_last_flushes_empty_them(plan: UpdatePlan) -> None:
    schedule = plan.schedule
    flushes = [action.name for action in schedule.actions if action.kind is ActionKind.FLUSH_STATES]
    waits = flushes_before(schedule)
    assert list(waits.values()) == flushes[len(flushes) - schedule.num_slots :]
    now, following = memory_of_units(schedule, 0), memory_of_units(schedule, 1)
    for prefetch, flush in waits.items():
        unit, emptied = (int(name.split()[1]) for name in (prefetch, flush))
        assert following[unit] == now[emptied], (
            "no flush out of this memory is later, since those that follow use others"
        )
        assert flushes.index(flush) >= flushes.index(f"FLUSH_STATES {unit}"), "the states are in host memory"


def test_slots_are_not_shifted_if_units_would_use_too_many_of_them() -> None:
    def shift(units: int, num_slots: int) -> int:
        plan = UpdatePlan(
            workload=Workload.from_numels([4] * units), placements=(STREAMED,) * units, num_slots=num_slots
        )
        return slot_shift(plan.schedule)

    assert shift(140, 61) == 18
    assert shift(200, 160) == 40, "each unit uses 4 of the slots"
    assert shift(200, 159) == 0


def test_a_prefetch_waits_for_the_flush_of_its_unit_if_that_is_later() -> None:
    """Check it for units that do not use the slots in turn: unit 1 is flushed after unit 0 has emptied the memory."""
    assert flushes_before(NOT_IN_TURN) == {"PREFETCH 0": "FLUSH_STATES 2"}
    first_slot_only = {"PREFETCH 0": "FLUSH_STATES 0", "PREFETCH 1": "FLUSH_STATES 0"}
    with pytest.raises(ScheduleError, match="may start before FLUSH_STATES 2 has finished"):
        check_next_update(NOT_IN_TURN, first_slot_only)


NOT_IN_TURN = parse_schedule(
    """\
PREFETCH 0 slot 0
PREFETCH 1 slot 1
GPU_STEP 0 slot 0 after PREFETCH 0
FLUSH_STATES 0 slot 0 after GPU_STEP 0
GPU_STEP 1 slot 1 after PREFETCH 1
FLUSH_STATES 1 slot 1 after GPU_STEP 1
PREFETCH 2 slot 1 after FLUSH_STATES 1
GPU_STEP 2 slot 1 after PREFETCH 2
FLUSH_STATES 2 slot 1 after GPU_STEP 2
""",
    num_slots=2,
    slot_numel=4,
)


@pytest.mark.promise("P6")
@given(plans(max_numel=300, may_be_on_disk=True))
def test_the_next_update_is_refused_without_one_of_its_waits_for_flushes(plan: UpdatePlan) -> None:
    waits = flushes_before(plan.schedule)
    check_next_update(plan.schedule, waits)
    for left_out in waits:
        with pytest.raises(ScheduleError, match=r"of the next update may start before (FLUSH_STATES|WRITE)"):
            check_next_update(
                plan.schedule, {prefetch: flush for prefetch, flush in waits.items() if prefetch != left_out}
            )


@given(schedules_with_more_waits(max_numel=300))
def test_the_next_update_by_any_checked_schedule_has_the_waits_that_it_needs(drawn: tuple[Schedule, Workload]) -> None:
    check(*drawn)
