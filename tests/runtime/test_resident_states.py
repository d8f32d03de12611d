"""Check that resident states are a write-back cache over host memory: when they are copied, and what orders the copies.

Each wait is also left out, which must give a wrong number in some timing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from deep_opt_states.device.cpu import HostDevice
from deep_opt_states.device.kernels.adam import AdamKernel, AdamTensors
from deep_opt_states.runtime.executor import Executor
from deep_opt_states.runtime.lanes import LaneStreams
from deep_opt_states.runtime.resident_states import ResidentStates
from deep_opt_states.runtime.state import Slot
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import STATES, Range, Unit, Workload
from tests.fake_device.device import FakeDevice
from tests.fake_device.timing import Late, Seeded, late_lanes
from tests.runtime.moving import WRITTEN, Model, MovingIteration, MovingTraining, train_serially
from tests.runtime.plain_adam import PlainAdam, adam_step
from tests.runtime.random_states import same, with_persistent

CPU, STREAMED, RESIDENT = Placement.CPU, Placement.STREAMED, Placement.RESIDENT
MODEL = Model(numels=(20, 9), persistent=[[(14, 18)], []])
WORKLOAD = Workload((Unit(0, (Range(0, 0, 16),)), Unit(1, (Range(0, 16, 4),)), Unit(2, (Range(1, 0, 9),))))
PLAN, OTHER_PLAN = (
    with_persistent(UpdatePlan(workload=WORKLOAD, placements=placements, num_slots=1), MODEL.persistent)
    for placements in ((RESIDENT, CPU, RESIDENT), (RESIDENT, STREAMED, CPU))
)
TIMINGS = [*late_lanes(6), *map(Seeded, range(60))]


class ResidentCopies:
    """The copies to and from the resident states of a training, counted by tensor."""

    def __init__(self, training: MovingTraining) -> None:
        self.loaded = self.written = 0
        self._states: list[Slot] = [unit.resident.states for unit in training.memory.units if unit.resident]
        self._copy = training.device.copy
        training.device.copy = self._counted

    def _counted(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        resident = {getattr(states, name).data_ptr() for states in self._states for name in STATES}
        self.loaded += destination.data_ptr() in resident
        self.written += source.data_ptr() in resident
        self._copy(destination, source)


@pytest.mark.parametrize("device", [HostDevice(), FakeDevice(Late())], ids=["host", "fake device"])
def test_resident_states_are_loaded_once_until_the_states_are_given_back(device: Any) -> None:
    training = MovingTraining(MODEL, PLAN, device)
    copies = ResidentCopies(training)
    all_states = len(STATES) * 2
    before = training.memory.sub_groups[1].master.clone()
    for number in range(3):
        list(training.run(number, MovingIteration(plan=PLAN, prefetches=number == 1)))
        assert (copies.loaded, copies.written) == (all_states, 0)
    assert torch.equal(training.memory.sub_groups[1].master, before), "host memory has the states of the last loading"
    for _ in range(2):
        training.executor.sync_states_to_host()
        assert (copies.loaded, copies.written) == (all_states, all_states)
    assert not torch.equal(training.memory.sub_groups[1].master, before)
    for number in range(3, 5):
        list(training.run(number, MovingIteration(plan=PLAN)))
        assert (copies.loaded, copies.written) == (2 * all_states, all_states)
    training.end()


def test_a_move_writes_resident_states_back_once_and_loads_those_of_the_new_plan() -> None:
    training = MovingTraining(MODEL, PLAN, HostDevice())
    copies = ResidentCopies(training)
    list(training.run(0, MovingIteration(plan=PLAN)))
    training.move(OTHER_PLAN)
    assert copies.written == len(STATES) * 2
    copies = ResidentCopies(training)
    list(training.run(1, MovingIteration(plan=OTHER_PLAN)))
    assert (copies.loaded, copies.written) == (len(STATES), 0)
    training.end()


ITERATIONS = [
    MovingIteration(plan=PLAN, forward=[0, 2]),
    MovingIteration(plan=PLAN, writes_states=True, prefetches=True),
    MovingIteration(plan=OTHER_PLAN),
    MovingIteration(plan=PLAN, writes_states=True),
]


def nothing(executor: Executor) -> None:
    pass


def without_load_before_compute(executor: Executor) -> None:
    executor._residents._compute = mock.Mock()


def without_write_back_before_host(executor: Executor) -> None:
    executor._residents._written.synchronize = lambda: None


def gives_a_wrong_number(change: Callable[[Executor], None]) -> bool:
    """Return whether some timing gives a wrong number in training whose executor was changed."""
    expected = train_serially(MODEL, ITERATIONS)
    for timing in TIMINGS:
        training = MovingTraining(MODEL, PLAN, FakeDevice(timing))
        change(training.executor)
        if not same(training.train(ITERATIONS), expected):
            return True
    return False


def test_resident_states_in_every_timing_give_the_serial_bits() -> None:
    assert not gives_a_wrong_number(nothing)


@pytest.mark.parametrize("change", [without_load_before_compute, without_write_back_before_host])
def test_leaving_out_a_wait_of_the_resident_states_gives_a_wrong_number(change: Callable[[Executor], None]) -> None:
    assert gives_a_wrong_number(change)


@pytest.mark.parametrize("method", ["load", "mark_updated", "write_back", "invalidate"])
def test_leaving_out_a_copy_or_a_mark_of_the_resident_states_gives_a_wrong_number(method: str) -> None:
    with mock.patch.object(ResidentStates, method):
        assert gives_a_wrong_number(nothing)


def finish(device: FakeDevice) -> None:
    """Run all operations that were issued."""
    while device.lanes.run_one():
        pass


def move_while_loading(training: MovingTraining) -> None:
    """Drop resident units while the copies to their memory are in flight, for an update that never begins."""
    training.executor.prefetch()
    cpu = UpdatePlan(workload=WORKLOAD, placements=(CPU, CPU, CPU), num_slots=1)
    training.move(cpu)
    training.end()


def test_a_move_waits_for_the_loading_of_memory_that_it_frees() -> None:
    for timing in TIMINGS:
        move_while_loading(MovingTraining(MODEL, PLAN, FakeDevice(timing)))


def test_a_move_that_does_not_wait_for_the_loading_writes_to_freed_memory() -> None:
    # The copies to the resident memory come last.
    training = MovingTraining(MODEL, PLAN, FakeDevice(Late([1, 2, 3, 4, 5])))
    with mock.patch.object(LaneStreams, "wait_until_drained"):
        move_while_loading(training)
    with pytest.raises(AssertionError, match="memory that was freed before"):
        finish(training.device)


def close_after_prefetches(device: FakeDevice) -> None:
    """Close the executor while prefetches are in flight, for an update that never begins, and run them then."""
    plan = UpdatePlan(workload=WORKLOAD, placements=(STREAMED, RESIDENT, STREAMED), num_slots=2)
    training = MovingTraining(MODEL, plan, device)
    training.executor.prefetch()
    training.executor.close()
    training.memory.close()
    finish(device)


def test_close_waits_for_prefetches_in_flight() -> None:
    for timing in TIMINGS:
        close_after_prefetches(FakeDevice(timing))


def test_close_that_does_not_wait_for_prefetches_writes_to_freed_memory() -> None:
    # The prefetches come last.
    with (
        mock.patch.object(LaneStreams, "drain"),
        pytest.raises(AssertionError, match="memory that was freed before"),
    ):
        close_after_prefetches(FakeDevice(Late([1, 2, 3, 4, 5])))


class FailsInStepTwo(PlainAdam):
    """A kernel that raises in the second step, when it updates sub-group 0."""

    def update(self, sub_group: int, *arguments: Any) -> None:
        if self.begun[-1][0].step == 2 and sub_group == 0:
            raise ZeroDivisionError
        super().update(sub_group, *arguments)


class FailingModel(Model):
    """A model whose update on the CPU fails in the second step."""

    def kernel(self) -> AdamKernel:
        return FailsInStepTwo()

    def device_kernel(self) -> AdamKernel:
        return PlainAdam()


def restore(training: MovingTraining) -> None:
    """Write states in host memory as from a checkpoint, and forget the failure."""
    for tensors in training.memory.sub_groups:
        for name in STATES:
            getattr(tensors, name).fill_(WRITTEN)
    training.executor.clear_failure()


def assert_next_update_starts_from_the_restored_states(training: MovingTraining, number: int) -> None:
    list(training.run(number, MovingIteration(plan=PLAN)))
    found = training.end()
    for index, gradient in enumerate(MODEL.gradients(number)):
        master, exp_avg, exp_avg_sq = (torch.full_like(gradient, WRITTEN) for _ in STATES)
        kernel = PlainAdam()
        kernel.begin_step([adam_step(1 + number)] * 2)
        param = torch.empty(gradient.numel(), dtype=MODEL.dtype)
        tensors = {"master": master, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        kernel.update(index, AdamTensors(**tensors, grad=gradient, param=param))
        assert same(found[3 * index : 3 * index + 3], list(tensors.values()))
        assert torch.equal(found[3 * 2 + index], param)


@pytest.mark.promise("P6")
def test_resident_states_of_a_failed_update_are_not_used_after_a_restart() -> None:
    for timing in TIMINGS:
        training = MovingTraining(FailingModel(**vars(MODEL)), PLAN, FakeDevice(timing))
        list(training.run(0, MovingIteration(plan=PLAN)))
        training.backward(1)
        training.executor.begin([adam_step(2)] * 2)
        training.executor.end()
        assert isinstance(training.executor.failure, ZeroDivisionError)
        training.executor.sync_states_to_host()
        restore(training)
        assert_next_update_starts_from_the_restored_states(training, 2)


def test_states_that_were_prefetched_before_another_rank_failed_are_not_used_after_a_restart() -> None:
    plan = UpdatePlan(workload=WORKLOAD, placements=(RESIDENT, STREAMED, STREAMED), num_slots=2)
    for timing in TIMINGS:
        training = MovingTraining(MODEL, plan, FakeDevice(timing))
        list(training.run(0, MovingIteration(plan=plan, prefetches=True, is_skipped=True)))
        training.executor.fail(ZeroDivisionError())
        restore(training)
        assert_next_update_starts_from_the_restored_states(training, 1)
