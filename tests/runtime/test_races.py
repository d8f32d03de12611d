"""Check schedules under hostile timing: safe ones give the serial bits, and unsafe ones are refused.

Each unsafe schedule also gives a wrong number in some timing, so that the checker refuses nothing without need.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st

from deep_opt_states.runtime import executor as executor_module
from deep_opt_states.runtime.lanes import LaneStreams
from perf_model.prediction.timeline import Timeline
from perf_model.schedule.action import Lane
from perf_model.schedule.check import ScheduleError, check
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.schedule import Schedule
from perf_model.schedule.workload import Workload
from tests.fake_device.device import FakeDevice
from tests.fake_device.timing import Late, Timing
from tests.model.mutations import with_two_actions_swapped, without_one_wait
from tests.model.strategies import plans, schedules, schedules_with_more_waits
from tests.runtime.hostile import (
    ORDERS,
    hostile_executor,
    pinned_states,
    run,
    same,
    serial,
    small_plans,
    timings,
)

SLOTS = [
    pytest.param((1, 4), id="1 or 4 slots"),
    pytest.param((2, 3), id="2 or 3 slots", marks=pytest.mark.thorough),
]
"""Numbers of slots whose plans are checked together. With one, all units wait for each other; with four, none does."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def numels_of(workload: Workload) -> list[int]:
    return [unit.numel for unit in workload.units]


def assert_serial_bits(schedule: Schedule, workload: Workload, timing: Timing, dtype: torch.dtype) -> None:
    note(f"{workload}\n{schedule}")
    numels = numels_of(workload)
    trained = run(schedule, numels, timing, steps=3, dtype=dtype)
    assert same(trained, serial(numels, steps=3, dtype=dtype))
    assert_waits_are_kept(trained.last())


def assert_waits_are_kept(timeline: Timeline) -> None:
    """Assert that no action started before the actions that it waits for had finished, by the device's time.

    Actions of the CPU lane are left out, because they are measured by another clock.
    """
    spans = {span.action.name: span for span in timeline.spans if span.action.lane is not Lane.CPU}
    assert spans or not timeline.spans
    for span in spans.values():
        ends = [spans[name].end_s for name in span.action.waits if name in spans]
        assert 0 <= max(ends, default=0) <= span.start_s <= span.end_s


@pytest.mark.promise("P1", "P2")
@given(plans(max_numel=2000), timings, st.sampled_from(DTYPES))
def test_every_plan_gives_the_serial_bits_whatever_the_timing(
    plan: UpdatePlan, timing: Timing, dtype: torch.dtype
) -> None:
    assert_serial_bits(plan.schedule, plan.workload, timing, dtype)


@given(schedules_with_more_waits(max_numel=2000), timings)
def test_every_checked_schedule_gives_the_serial_bits_whatever_the_timing(
    drawn: tuple[Schedule, Workload], timing: Timing
) -> None:
    check(*drawn)
    assert_serial_bits(*drawn, timing, torch.bfloat16)


def gives_a_wrong_number(mutant: Schedule, workload: Workload) -> bool:
    """Return whether one step gives a wrong number or NaN in some order of lanes, with the checker switched off."""
    numels = numels_of(workload)
    expected = serial(numels, steps=1)
    with mock.patch.object(executor_module, "check_executable"):
        return any(not same(run(mutant, numels, Late(order), steps=1), expected) for order in ORDERS)


@pytest.mark.promise("P6")
@pytest.mark.parametrize("slots", SLOTS)
def test_missing_wait_is_refused_and_gives_a_wrong_number(slots: tuple[int, ...]) -> None:
    seen = 0
    for plan in small_plans(slots):
        for mutation, mutant in without_one_wait(plan.schedule):
            with pytest.raises(ScheduleError, match="may start before"):
                check(mutant, plan.workload)
            assert gives_a_wrong_number(mutant, plan.workload), f"{mutation}: no timing shows it\n{plan.schedule}"
            seen += 1
    assert seen > 290


@given(schedules(max_numel=10))
def test_missing_wait_of_any_schedule_gives_a_wrong_number(drawn: tuple[Schedule, Workload]) -> None:
    schedule, workload = drawn
    for mutation, mutant in without_one_wait(schedule):
        note(f"{mutation}\n{workload}\n{schedule}")
        assert gives_a_wrong_number(mutant, workload)


@pytest.mark.parametrize("method", ["wait_for_caller", "wait_until_drained"])
def test_update_that_does_not_wait_for_backward_or_for_its_own_end_gives_a_wrong_number(method: str) -> None:
    for plan in small_plans():
        with mock.patch.object(LaneStreams, method):
            assert gives_a_wrong_number(plan.schedule, plan.workload), f"no timing shows it\n{plan.schedule}"


@pytest.mark.parametrize("slots", SLOTS)
def test_swapped_actions_are_refused_unless_every_timing_gives_the_serial_bits(slots: tuple[int, ...]) -> None:
    """Check all swaps of two actions. Happens-before is a partial order, so two unordered actions may be swapped.

    An accepted schedule must give the serial bits: each in one order of lanes, and every 50th in all orders.
    """
    refused = harmless = 0
    for plan in small_plans(slots):
        for mutation, mutant in with_two_actions_swapped(plan.schedule):
            try:
                check(mutant, plan.workload)
            except ScheduleError:
                refused += 1
            else:
                harmless += 1
                orders = ORDERS if harmless % 50 == 0 else [ORDERS[harmless % len(ORDERS)]]
                numels = numels_of(plan.workload)
                expected = serial(numels)
                assert all(same(run(mutant, numels, Late(order)), expected) for order in orders), mutation
    assert refused > 2000
    assert harmless > 300


@given(plans(max_numel=2000))
def test_the_runtime_takes_the_memory_that_the_plan_declares(plan: UpdatePlan) -> None:
    """Check that slots take what the schedule declares, and resident units their states."""
    device = FakeDevice()
    states = pinned_states(device, numels_of(plan.workload), torch.bfloat16)
    before = device.allocated_bytes
    executor = hostile_executor(plan.schedule, states, device)
    resident_bytes, slot_bytes = 12 * plan.numel(Placement.RESIDENT), 12 * plan.schedule.slot_numel
    assert device.allocated_bytes - before == plan.schedule.num_slots * slot_bytes + resident_bytes
    executor.close()
    assert device.allocated_bytes - before == resident_bytes
