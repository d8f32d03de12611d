"""Check schedules on the software GPU: safe ones have no race and give the serial bits, and unsafe ones are refused."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from unittest import mock

import pytest
from hypothesis import given, note
from hypothesis import strategies as st

from deep_opt_states.runtime import executor as executor_module
from deep_opt_states.runtime import worker as worker_module
from deep_opt_states.runtime.issuer import Issuer
from deep_opt_states.runtime.worker import Task, Worker
from perf_model.schedule.action import Lane
from perf_model.schedule.check import ScheduleError, check
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.schedule import Schedule
from perf_model.schedule.workload import Workload
from tests.model.strategies import schedules, schedules_with_more_waits, without_one_wait
from tests.runtime.moving import Model, MovingIteration, MovingTraining, train_serially
from tests.runtime.on_software_gpu import SoftwareDevice, faults_of
from tests.runtime.random_states import same
from tests.software_gpu.plugged import plugged
from tests.software_gpu.ranks import on_device


def with_schedule(workload: Workload, placements: Sequence[Placement], schedule: Schedule) -> UpdatePlan:
    """Return a plan that is executed by ``schedule``, and not by the one that it would lower."""
    plan = UpdatePlan(workload=workload, placements=tuple(placements), num_slots=1)
    vars(plan)["schedule"] = schedule
    return plan


def is_right(plan: UpdatePlan, steps: int) -> bool:
    model = Model(numels=tuple(unit.numel for unit in plan.workload.units), persistent=[])
    iterations = [MovingIteration(plan=plan)] * steps
    training = MovingTraining(model, plan, SoftwareDevice())
    found = training.train(iterations)
    last = {span.action.name: span for span in training.executor.timeline_reader()().spans}
    assert [*last] == [action.name for action in plan.schedule.actions]
    for span in last.values():
        # The CPU lane is measured by another clock.
        before = [last[name] for name in span.action.waits if last[name].action.lane is not Lane.CPU]
        assert span.action.lane is Lane.CPU or max([0, *(each.end_s for each in before)]) <= span.start_s <= span.end_s
    return same(found, train_serially(model, iterations))


@contextmanager
def late_worker() -> Iterator[None]:
    issued, issue_all = threading.Event(), Issuer.issue_all

    class LateWorker(Worker):
        def submit(self, task: Task) -> Future[None]:
            return super().submit(lambda: (issued.wait(10), task())[1])

    def issue_all_first(issuer: Issuer) -> None:
        issue_all(issuer)
        issued.set()

    late = mock.patch.object(worker_module, "Worker", LateWorker)
    with late, mock.patch.object(Issuer, "issue_all", issue_all_first):
        yield


def has_fault(plan: UpdatePlan) -> bool:
    """Return whether one step has a race or gives a wrong number, with the checker switched off."""
    with mock.patch.object(executor_module, "check_executable"), late_worker():
        return bool(faults_of(partial(is_right, plan, steps=1)))


def small_plans() -> Iterator[UpdatePlan]:
    for count, codes in ((4, range(2**4)), (6, (0b111111, 0b010101, 0b110110, 0b011110))):
        workload = Workload.from_numels([5, 3, 8, 2, 7, 4][:count])
        for code in codes:
            placements = tuple(Placement.STREAMED if code >> index & 1 else Placement.CPU for index in range(count))
            for num_slots in (1, 4):
                yield UpdatePlan(workload=workload, placements=placements, num_slots=num_slots)


@pytest.mark.P1
@pytest.mark.P2
@on_device
@plugged()
@given(schedules_with_more_waits(max_numel=2000))
def test_every_checked_schedule_has_no_race_and_gives_the_serial_bits(drawn: tuple[Schedule, Workload]) -> None:
    schedule, workload = drawn
    note(f"{workload}\n{schedule}")
    plan = with_schedule(workload, check(schedule, workload), schedule)
    assert faults_of(partial(is_right, plan, steps=3)) == []


@pytest.mark.P6
@on_device
@plugged()
def test_missing_wait_is_refused_and_is_a_fault() -> None:
    seen = 0
    for plan in small_plans():
        for mutation, mutant in without_one_wait(plan.schedule):
            with pytest.raises(ScheduleError, match="may start before"):
                check(mutant, plan.workload)
            unsafe = with_schedule(plan.workload, plan.placements, mutant)
            assert has_fault(unsafe), f"{mutation}: neither a race nor a wrong number\n{plan.schedule}"
            seen += 1
    assert seen > 290


@on_device
@plugged()
@given(schedules(max_numel=10), st.integers(0, 100))
def test_missing_wait_of_any_schedule_is_a_fault(drawn: tuple[Schedule, Workload], number: int) -> None:
    schedule, workload = drawn
    mutants = list(without_one_wait(schedule))
    for mutation, mutant in mutants[number % max(1, len(mutants)) :][:2]:
        note(f"{mutation}\n{workload}\n{schedule}")
        assert has_fault(with_schedule(workload, check(schedule, workload), mutant))
