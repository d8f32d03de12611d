"""Check schedules under hostile timing: safe ones give the serial bits, and unsafe ones are refused.

Each unsafe schedule also gives a wrong number in some timing, so that the checker refuses nothing without need.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from unittest import mock

import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st

from deep_opt_states.runtime import executor as executor_module
from perf_model.schedule.action import Lane
from perf_model.schedule.check import ScheduleError, check
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.schedule import Schedule
from perf_model.schedule.workload import Workload
from tests.fake_device.device import FakeDevice
from tests.fake_device.queues import Late, Timing
from tests.model.strategies import schedules, schedules_with_more_waits, without_one_wait
from tests.runtime.moving import ORDERS, Model, MovingIteration, MovingTraining, timings, train_serially
from tests.runtime.random_states import same


def with_schedule(workload: Workload, placements: Sequence[Placement], schedule: Schedule) -> UpdatePlan:
    """Return a plan that is executed by ``schedule``, and not by the one that it would lower."""
    plan = UpdatePlan(workload=workload, placements=tuple(placements), num_slots=1)
    vars(plan)["schedule"] = schedule
    return plan


def is_right(plan: UpdatePlan, timing: Timing, steps: int) -> bool:
    """Return whether all numbers are right after updates that begin before the device has done backward."""
    model = Model(numels=tuple(unit.numel for unit in plan.workload.units), persistent=[])
    iterations = [MovingIteration(plan=plan)] * steps
    training = MovingTraining(model, plan, FakeDevice(timing))
    found = training.train(iterations)
    last = {span.action.name: span for span in training.executor.timeline_reader()().spans}
    assert [*last] == [action.name for action in plan.schedule.actions]
    for span in last.values():
        # The CPU lane is measured by another clock.
        before = [last[name] for name in span.action.waits if last[name].action.lane is not Lane.CPU]
        assert span.action.lane is Lane.CPU or max([0, *(each.end_s for each in before)]) <= span.start_s <= span.end_s
    return same(found, train_serially(model, iterations))


def gives_a_wrong_number(plan: UpdatePlan) -> bool:
    """Return whether one step gives a wrong number or NaN in some order of lanes, with the checker switched off."""
    with mock.patch.object(executor_module, "check_executable"):
        return any(not is_right(plan, Late(order), steps=1) for order in ORDERS)


def small_plans() -> Iterator[UpdatePlan]:
    """Yield all placements of 4 units, and mixed placements of 6.

    With one slot, all units wait for each other; with four, none does.
    """
    for count, codes in ((4, range(2**4)), (6, (0b111111, 0b010101, 0b110110, 0b011110))):
        workload = Workload.from_numels([5, 3, 8, 2, 7, 4][:count])
        for code in codes:
            placements = tuple(Placement.STREAMED if code >> index & 1 else Placement.CPU for index in range(count))
            for num_slots in (1, 4):
                yield UpdatePlan(workload=workload, placements=placements, num_slots=num_slots)


@pytest.mark.P1
@pytest.mark.P2
@given(schedules_with_more_waits(max_numel=2000), timings)
def test_every_checked_schedule_gives_the_serial_bits_whatever_the_timing(
    drawn: tuple[Schedule, Workload], timing: Timing
) -> None:
    schedule, workload = drawn
    note(f"{workload}\n{schedule}")
    assert is_right(with_schedule(workload, check(schedule, workload), schedule), timing, steps=3)


@pytest.mark.P6
def test_missing_wait_is_refused_and_gives_a_wrong_number() -> None:
    seen = 0
    for plan in small_plans():
        for mutation, mutant in without_one_wait(plan.schedule):
            with pytest.raises(ScheduleError, match="may start before"):
                check(mutant, plan.workload)
            unsafe = with_schedule(plan.workload, plan.placements, mutant)
            assert gives_a_wrong_number(unsafe), f"{mutation}: no timing shows it\n{plan.schedule}"
            seen += 1
    assert seen > 290


@given(schedules(max_numel=10), st.integers(0, 100))
def test_missing_wait_of_any_schedule_gives_a_wrong_number(drawn: tuple[Schedule, Workload], number: int) -> None:
    schedule, workload = drawn
    mutants = list(without_one_wait(schedule))
    for mutation, mutant in mutants[number % max(1, len(mutants)) :][:2]:
        note(f"{mutation}\n{workload}\n{schedule}")
        assert gives_a_wrong_number(with_schedule(workload, check(schedule, workload), mutant))


# The fake device


def test_copies_run_late_and_memory_freed_before_a_stream_is_done_with_it_is_poisoned_unless_recorded() -> None:
    device = FakeDevice(Late([0]))
    stream, end = device.stream(), device.event()
    copied, computed, result, staged, freed = (device.empty(2, torch.float32) for _ in range(5))
    for_the_copy, for_the_kernel = (device.empty_host(2, torch.float32).fill_(5) for _ in range(2))
    scratch, pageable = device.empty(4, torch.float32).fill_(7), torch.ones(2)
    with stream.issue():
        device.copy(copied, for_the_copy)
        device.launch(torch.Tensor.copy_, computed, for_the_kernel)
        device.copy(result, scratch[2:])
        device.copy(staged, pageable)
    pageable.fill_(2)
    assert copied.isnan().all()
    del for_the_copy, for_the_kernel, scratch
    stream.record(end)
    end.synchronize()
    assert copied.tolist() == [5, 5]
    assert staged.tolist() == [1, 1], "pageable memory is read when the copy is issued"
    assert computed.isnan().all()
    assert result.isnan().all()
    with stream.issue():
        device.copy(freed, copied)
    del freed
    stream.record(end)
    with pytest.raises(AssertionError, match="memory that was freed before"):
        end.synchronize()
