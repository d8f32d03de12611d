"""Check when the masters that the CPU updates are split, and that they are fp32 whenever other code may use them."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from deep_opt_states.device.kernels import split_form
from deep_opt_states.runtime.split_masters import SplitMasters
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Unit, Workload
from tests.fake_device.device import FakeDevice
from tests.fake_device.timing import Late
from tests.runtime.moving import Model, MovingIteration, MovingTraining, same, train_serially

MODEL = Model(numels=(96, 50), early=[[(10, 20)], []], grad_dtype=torch.bfloat16, has_vectors=True, may_split=True)
UNITS = (Unit(0, 64, 0, 0), Unit(1, 32, 0, 64), Unit(2, 50, 1, 0))


def plan_with(*placements: Placement) -> UpdatePlan:
    return UpdatePlan(workload=Workload(UNITS), placements=placements, num_slots=1)


ON_CPU = plan_with(Placement.CPU, Placement.CPU, Placement.CPU)
MIXED = plan_with(Placement.CPU, Placement.STREAMED, Placement.RESIDENT)


@pytest.fixture
def training() -> MovingTraining:
    return MovingTraining(MODEL, MIXED, FakeDevice(Late()))


def split_ranges(training: MovingTraining) -> set[tuple[int, int, int]]:
    masters: SplitMasters = training.executor._split_masters
    return {(sub_group, elements.begin, elements.end) for sub_group, elements in masters._are_split}


def test_only_what_the_cpu_updates_and_publishes_by_itself_is_split(training: MovingTraining) -> None:
    """Check that early ranges, streamed and resident units are not split, and everything is joined for readers."""
    list(training.run(0, MovingIteration(plan=MIXED)))
    assert split_ranges(training) == {(0, 0, 10), (0, 20, 64)}
    training.executor.finish()
    training.executor.give_states_back()
    assert split_ranges(training) == set()
    training.end()


def test_ranges_stay_split_from_one_update_to_the_next(training: MovingTraining) -> None:
    iterations = [MovingIteration(plan=MIXED) for _ in range(4)]
    with mock.patch.object(split_form, "split", wraps=split_form.split) as split:
        found = training.train(iterations)
    assert split.call_count == 2, "once for each range"
    assert same(found, train_serially(MODEL, iterations))


def test_a_move_joins_the_ranges_that_the_accelerator_updates_from_now_on(training: MovingTraining) -> None:
    plans = [ON_CPU, MIXED, ON_CPU]
    iterations = [MovingIteration(plan=plan) for plan in plans]
    training.set_plan(ON_CPU)
    read = list(training.run(0, iterations[0]))
    assert split_ranges(training) == {(0, 0, 10), (0, 20, 64), (0, 64, 96), (1, 0, 50)}
    training.move(MIXED)
    assert split_ranges(training) == {(0, 0, 10), (0, 20, 64)}
    read.extend(training.run(1, iterations[1]))
    training.move(ON_CPU)
    read.extend(training.run(2, iterations[2]))
    assert same([*read, *training.end()], train_serially(MODEL, iterations))


def test_evicted_units_are_split_while_the_cpu_updates_them(training: MovingTraining) -> None:
    iterations = [MovingIteration(plan=MIXED) for _ in range(3)]
    read = list(training.run(0, iterations[0]))
    for number, is_evicted in ((1, True), (2, False)):
        training.executor.write_back()
        training.memory.set_plan(MIXED, is_evicted=is_evicted)
        training.executor.set_units(MIXED.schedule, training.memory.units, training._splits())
        read.extend(training.run(number, iterations[number]))
        evicted = {(0, 64, 96), (1, 0, 50)} if is_evicted else set()
        assert split_ranges(training) == {(0, 0, 10), (0, 20, 64), *evicted}
    assert same([*read, *training.end()], train_serially(MODEL, iterations))


def test_masters_are_joined_after_a_failed_update_too(training: MovingTraining) -> None:
    """Check what a checkpoint is loaded into after a failure."""
    list(training.run(0, MovingIteration(plan=MIXED)))
    training.executor.finish()
    training.executor.fail(RuntimeError("on another rank"))
    training.executor.give_states_back()
    assert split_ranges(training) == set()


def test_a_negative_second_moment_ends_the_update_before_anything_is_updated(training: MovingTraining) -> None:
    training.memory.sub_groups[0].exp_avg_sq[30] = -1.0
    before = training.memory.sub_groups[1].master.clone()
    training.backward(0)
    training.executor.begin([])
    training.executor.finish()
    assert isinstance(training.executor.failure, ValueError)
    assert torch.equal(training.memory.sub_groups[1].master, before)


def test_states_and_gradients_take_14_bytes_per_parameter_of_host_memory(training: MovingTraining) -> None:
    whole = MovingTraining(
        Model(numels=MODEL.numels, early=MODEL.early, grad_dtype=torch.bfloat16), MIXED, FakeDevice(Late())
    )
    found = [
        sum(
            tensor.nbytes
            for tensors in one.memory.sub_groups
            for tensor in vars(tensors).values()
            if tensor is not None
        )
        for one in (training, whole)
    ]
    assert found == [14 * sum(MODEL.numels), 16 * sum(MODEL.numels)]
