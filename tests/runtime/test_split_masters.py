"""Check when masters are split, where their upper halves are, and that other code finds them in fp32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from unittest import mock

import pytest
import torch

from deep_opt_states.device.kernels import split_form
from deep_opt_states.device.kernels.adam import STATES, AdamTensors, ElementRange
from deep_opt_states.runtime.executor import Executor
from deep_opt_states.runtime.failure import ParameterWritten
from deep_opt_states.runtime.split_masters import SplitMasters
from deep_opt_states.runtime.state import Slot, UnitState
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Unit, Workload
from tests.fake_device.device import FakeDevice, LateChecksum
from tests.fake_device.timing import Late
from tests.runtime.moving import Model, MovingIteration, MovingTraining, train_serially
from tests.runtime.plain_adam import adam_step
from tests.runtime.random_states import same
from tests.runtime.test_unit_moves import short_of_memory

MODEL = Model(numels=(96, 50), early=[[(10, 20)], []], grad_dtype=torch.bfloat16, has_vectors=True, may_split=True)
UNITS = (Unit(0, 64, 0, 0), Unit(1, 32, 0, 64), Unit(2, 50, 1, 0))


def plan_with(*placements: Placement) -> UpdatePlan:
    return UpdatePlan(workload=Workload(UNITS), placements=placements, num_slots=1)


ON_CPU = plan_with(Placement.CPU, Placement.CPU, Placement.CPU)
MIXED = plan_with(Placement.CPU, Placement.STREAMED, Placement.RESIDENT)
STREAMED = plan_with(Placement.STREAMED, Placement.STREAMED, Placement.STREAMED)
RESIDENT = plan_with(Placement.RESIDENT, Placement.RESIDENT, Placement.RESIDENT)

OF_CPU = {(0, 0, 10), (0, 20, 64)}
OF_ACCELERATOR = {(0, 64, 96), (1, 0, 50)}


@pytest.fixture
def training() -> MovingTraining:
    return MovingTraining(MODEL, MIXED, FakeDevice(Late()))


def split_ranges(training: MovingTraining) -> set[tuple[int, int, int]]:
    masters: SplitMasters = training.executor._split_masters
    return {(sub_group, one.begin, one.end) for (sub_group, one), known in masters._ranges.items() if known.is_split}


def held_by_params(training: MovingTraining) -> set[tuple[int, int, int]]:
    """Return the ranges whose upper halves are valid in the parameters only."""
    masters: SplitMasters = training.executor._split_masters
    found = {
        (sub_group, one.begin, one.end) for (sub_group, one), known in masters._ranges.items() if known.upper_is_param
    }
    assert found <= split_ranges(training)
    return found


def test_all_but_the_early_ranges_are_split_and_the_accelerator_has_the_upper_halves_of_its_units(
    training: MovingTraining,
) -> None:
    list(training.run(0, MovingIteration(plan=MIXED)))
    assert split_ranges(training) == OF_CPU | OF_ACCELERATOR
    assert held_by_params(training) == OF_ACCELERATOR
    training.executor.finish()
    training.executor.give_states_back()
    assert split_ranges(training) == held_by_params(training) == set()
    training.end()


def test_a_resident_unit_is_split_as_a_whole_with_its_early_ranges() -> None:
    iterations = [MovingIteration(plan=RESIDENT) for _ in range(3)]
    training = MovingTraining(MODEL, RESIDENT, FakeDevice(Late()))
    read = list(training.run(0, iterations[0]))
    assert held_by_params(training) == {(0, 0, 64), (0, 64, 96), (1, 0, 50)}
    for number in (1, 2):
        read.extend(training.run(number, iterations[number]))
    assert same([*read, *training.end()], train_serially(MODEL, iterations))


@pytest.mark.parametrize(
    ("plan", "count"), [(MIXED, 4), (STREAMED, 4), (RESIDENT, 3)], ids=["mixed", "streamed", "resident"]
)
def test_ranges_stay_split_from_one_update_to_the_next(plan: UpdatePlan, count: int) -> None:
    iterations = [MovingIteration(plan=plan, prefetches=True) for _ in range(4)]
    training = MovingTraining(MODEL, plan, FakeDevice(Late()))
    with mock.patch.object(split_form, "split", wraps=split_form.split) as split:
        found = training.train(iterations)
    assert split.call_count == count, "once for each range"
    assert same(found, train_serially(MODEL, iterations))


def test_moves_keep_ranges_split_and_bring_their_upper_halves_along(training: MovingTraining) -> None:
    plans = [ON_CPU, MIXED, STREAMED, RESIDENT, ON_CPU, RESIDENT, MIXED]
    held = [
        set(),
        OF_ACCELERATOR,
        OF_CPU | OF_ACCELERATOR,
        {(0, 0, 64), *OF_ACCELERATOR},
        set(),
        {(0, 0, 64), *OF_ACCELERATOR},
        OF_ACCELERATOR,
    ]
    iterations = [MovingIteration(plan=plan) for plan in plans]
    read: list[torch.Tensor] = []
    for number, (iteration, expected) in enumerate(zip(iterations, held, strict=True)):
        training.move(iteration.plan)
        read.extend(training.run(number, iteration))
        assert held_by_params(training) == expected, number
    assert same([*read, *training.end()], train_serially(MODEL, iterations))


def test_evicted_units_are_split_while_the_cpu_updates_them(training: MovingTraining) -> None:
    iterations = [MovingIteration(plan=MIXED) for _ in range(3)]
    read = list(training.run(0, iterations[0]))
    for number, is_evicted in ((1, True), (2, False)):
        training.executor.write_back()
        training.memory.set_plan(MIXED, is_evicted=is_evicted)
        training.executor.set_units(MIXED.schedule, training.memory.units, training._splits())
        read.extend(training.run(number, iterations[number]))
        assert split_ranges(training) == OF_CPU | OF_ACCELERATOR
        assert held_by_params(training) == (set() if is_evicted else OF_ACCELERATOR)
    assert same([*read, *training.end()], train_serially(MODEL, iterations))


@pytest.mark.parametrize("after", [ON_CPU, STREAMED, RESIDENT], ids=["cpu", "streamed", "resident"])
def test_a_move_for_which_any_allocation_fails_leaves_the_masters_in_use(after: UpdatePlan) -> None:
    for allocations in range(20):
        training = MovingTraining(MODEL, MIXED, FakeDevice(Late()))
        list(training.run(0, MovingIteration(plan=MIXED)))
        units = training.memory.units
        with short_of_memory(training.device, allocations), suppress(torch.OutOfMemoryError):
            training.move(after)
        has_moved = training.plan is after
        if not has_moved:
            training.memory.units = units
        list(training.run(1, MovingIteration(plan=training.plan)))
        assert training.executor.failure is None
        training.end()
        if has_moved:
            return
    pytest.fail("the move takes more allocations")


def training_of(plan: UpdatePlan, *, may_split: bool) -> MovingTraining:
    """Return a training run without early ranges."""
    model = Model(numels=MODEL.numels, early=[[], []], has_vectors=True, may_split=may_split)
    return MovingTraining(model, plan, FakeDevice(Late()))


def test_states_that_are_copied_and_kept_on_the_accelerator_take_10_bytes_per_parameter() -> None:
    for plan, numel in ((STREAMED, 64), (RESIDENT, 146)):
        whole, split = (training_of(plan, may_split=may_split) for may_split in (False, True))
        gained = whole.device.allocated_bytes - split.device.allocated_bytes
        sums_bytes = sum(
            sums.nbytes for one in split.executor._split_masters._ranges.values() for sums in one.sums.values()
        )
        buffer_bytes = 2 * max(unit.numel for unit in UNITS)
        assert gained + sums_bytes + 8 * 3 + buffer_bytes == 2 * numel
    copied: dict[bool, int] = {}
    for may_split in (False, True):
        training = training_of(STREAMED, may_split=may_split)
        list(training.run(0, MovingIteration(plan=STREAMED)))
        copies = training.executor._actions._state_copies
        assert len(copies) == 6, "a prefetch and a flush of each unit"
        copied[may_split] = sum(source.nbytes for pairs in copies.values() for _, source in pairs)
    assert copied == {False: 2 * 12 * 146, True: 2 * 10 * 146}


# Writes to parameters by the training script


Write = Callable[[torch.Tensor], torch.Tensor]
WRITES: dict[str, Write] = {
    "one element": lambda param: torch.cat([param[:7], param[7:8] + 1, param[8:]]),
    "the last element": lambda param: torch.cat([param[:-1], -param[-1:]]),
    "negation": torch.neg,
    "zeros": torch.zeros_like,
}


def write(training: MovingTraining, sub_group: int, begin: int, end: int, change: Write) -> None:
    """Write to a part of the parameters on the caller's stream."""
    device, param = training.device, training.params[sub_group][begin:end]
    now = training._copy_of(param)
    training._wait_for_caller()
    device.copy(param, device.empty(end - begin, param.dtype).copy_(change(now)))


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("place", [(0, 64, 96), (1, 0, 50)], ids=["streamed", "resident"])
@pytest.mark.parametrize("notices", ["next update", "reader", "move", "known write", "eviction"])
def test_a_write_to_parameters_behind_the_masters_ends_training(
    training: MovingTraining, name: str, place: tuple[int, int, int], notices: str
) -> None:
    executor = training.executor
    list(training.run(0, MovingIteration(plan=MIXED)))
    write(training, *place, WRITES[name])
    in_slab = training.memory.sub_groups[place[0]]
    states = torch.stack([in_slab.master, in_slab.exp_avg, in_slab.exp_avg_sq]).view(torch.int32)
    if notices == "next update":
        training.backward(1)
        executor.begin([])
        executor.finish()
        now = torch.stack([in_slab.master, in_slab.exp_avg, in_slab.exp_avg_sq]).view(torch.int32)
        assert torch.equal(now, states), "nothing is updated"
    elif notices == "reader":
        executor.give_states_back()
    elif notices == "move":
        training.move(ON_CPU)
    elif notices == "known write":
        executor.give_params_back()
    else:
        executor.write_back()
        training.memory.set_plan(MIXED, is_evicted=True)
        executor.set_units(MIXED.schedule, training.memory.units, training._splits())
    assert isinstance(executor.failure, ParameterWritten)
    sub_group, begin, end = place
    assert f"found other bits in elements {begin} to {end} of sub-group {sub_group}" in str(executor.failure)


@pytest.mark.parametrize("place", [(0, 64, 96), (1, 0, 50)], ids=["streamed", "resident"])
@pytest.mark.parametrize("end", [Executor.finish, Executor.finish_on_stream])
def test_a_write_in_the_last_update_is_noticed_without_another_one(
    training: MovingTraining, place: tuple[int, int, int], end: Callable[[Executor], None]
) -> None:
    """Write after the update has compared all sums, and before it reads the parameters."""
    list(training.run(0, MovingIteration(plan=MIXED)))
    training.backward(1)
    training.executor.begin([adam_step(2)] * 2)
    write(training, *place, torch.neg)
    training._wait_for_caller()
    end(training.executor)
    assert training.executor.failure is None
    training.executor.check_params()
    assert isinstance(training.executor.failure, ParameterWritten)
    sub_group, first, last = place
    assert f"elements {first} to {last} of sub-group {sub_group} in the last update" in str(training.executor.failure)


def test_updates_that_find_no_write_do_not_fail(training: MovingTraining) -> None:
    iterations = [MovingIteration(plan=MIXED, overlaps_flushes=number % 2 == 0) for number in range(4)]
    read: list[torch.Tensor] = []
    for number, iteration in enumerate(iterations):
        read.extend(training.run(number, iteration))
        training.executor.check_params()
        assert training.executor.failure is None
    assert same([*read, *training.end()], train_serially(MODEL, iterations))


@pytest.mark.parametrize("plan", [MIXED, STREAMED, RESIDENT], ids=["mixed", "streamed", "resident"])
@pytest.mark.parametrize("announce", [Executor.give_params_back, Executor.give_states_back])
@pytest.mark.parametrize("prefetches", [False, True])
def test_an_announced_write_is_forgotten_at_the_next_update(
    plan: UpdatePlan, announce: Callable[[Executor], None], prefetches: bool
) -> None:
    """Check it in every second iteration, of all parameters of units that the accelerator updates."""
    iterations = [MovingIteration(plan=plan, prefetches=prefetches) for _ in range(6)]
    expected = train_serially(MODEL, iterations)
    training = MovingTraining(MODEL, plan, FakeDevice(Late()))
    read: list[torch.Tensor] = []
    for number, iteration in enumerate(iterations):
        read.extend(training.run(number, iteration))
        training.executor.finish()
        if number % 2:
            continue
        announce(training.executor)
        for sub_group, begin, end in held_by_params(training) or OF_ACCELERATOR:
            write(training, sub_group, begin, end, torch.neg)
    found = [*read, *training.end()]
    states = len(MODEL.numels) * 3
    assert same(found[-states - 2 : -2], expected[-states - 2 : -2])
    assert same(found[-2:], expected[-2:])


def test_a_write_between_a_prefetch_and_the_update_is_noticed_or_forgotten(training: MovingTraining) -> None:
    list(training.run(0, MovingIteration(plan=MIXED)))
    training.executor.finish()
    training.executor.give_params_back()
    training.backward(1)
    training.executor.prefetch()
    write(training, 0, 64, 96, torch.zeros_like)
    expected = train_serially(MODEL, [MovingIteration(plan=MIXED)] * 2)
    list(training.run(1, MovingIteration(plan=MIXED)))
    assert same(training.end(), expected[-8:])


def saved_states(training: MovingTraining) -> list[AdamTensors]:
    """Return copies of all states, as a checkpoint has them. They are in host memory already."""
    return [tensors.adam_tensors.map(torch.clone) for tensors in training.memory.sub_groups]


def load_states(training: MovingTraining, saved: list[AdamTensors]) -> None:
    """Replace the states after a failure, as loading a checkpoint does."""
    for tensors, values in zip(training.memory.sub_groups, saved, strict=True):
        for name in STATES:
            getattr(tensors, name).copy_(getattr(values, name))
    training.executor.forget_failure()


def test_a_checkpoint_can_be_loaded_after_a_write_was_noticed(training: MovingTraining) -> None:
    list(training.run(0, MovingIteration(plan=MIXED)))
    training.executor.finish()
    training.executor.give_states_back()
    saved = saved_states(training)
    list(training.run(1, MovingIteration(plan=MIXED)))
    write(training, 0, 64, 96, torch.zeros_like)
    training.executor.finish()
    training.executor.give_states_back()
    assert isinstance(training.executor.failure, ParameterWritten)
    load_states(training, saved)
    list(training.run(1, MovingIteration(plan=MIXED)))
    expected = train_serially(MODEL, [MovingIteration(plan=MIXED)] * 2)
    assert same(training.end(), expected[-8:])


def test_masters_are_joined_after_a_failed_update_too(training: MovingTraining) -> None:
    """Check what a checkpoint is loaded into after a failure."""
    list(training.run(0, MovingIteration(plan=MIXED)))
    training.executor.finish()
    training.executor.fail(RuntimeError("on another rank"))
    training.executor.give_states_back()
    assert split_ranges(training) == held_by_params(training) == set()


def test_a_write_that_a_failed_update_has_found_is_forgotten_when_a_checkpoint_is_loaded(
    training: MovingTraining,
) -> None:
    """Check it of a write that the update itself has found, and that no comparison has reported before the failure."""
    list(training.run(0, MovingIteration(plan=MIXED)))
    training.executor.finish()
    training.executor.give_states_back()
    saved = saved_states(training)
    list(training.run(1, MovingIteration(plan=MIXED)))
    training.executor.finish()
    masters: SplitMasters = training.executor._split_masters
    sub_group, part = next(iter(masters._updated))
    masters._sums.compare((sub_group, part), training.device.empty(part.numel, torch.bfloat16).fill_(1.0))
    training.executor.fail(RuntimeError("on another rank"))
    training.executor.give_states_back()
    load_states(training, saved)
    list(training.run(1, MovingIteration(plan=MIXED)))
    expected = train_serially(MODEL, [MovingIteration(plan=MIXED)] * 2)
    assert same(training.end(), expected[-8:])
    assert training.executor.failure is None


def test_a_negative_second_moment_ends_the_update_before_anything_is_updated(training: MovingTraining) -> None:
    training.memory.sub_groups[0].exp_avg_sq[30] = -1.0
    before = training.memory.sub_groups[1].exp_avg.clone()
    training.backward(0)
    training.executor.begin([])
    training.executor.finish()
    assert isinstance(training.executor.failure, ValueError)
    assert str(training.executor.failure).startswith("sub-group 0: exp_avg_sq")
    assert torch.equal(training.memory.sub_groups[1].exp_avg, before)


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


# Faults that the comparisons above notice


def states_after_an_announced_write() -> list[torch.Tensor]:
    training = MovingTraining(MODEL, MIXED, FakeDevice(Late()))
    list(training.run(0, MovingIteration(plan=MIXED)))
    training.executor.give_params_back()
    for place in OF_ACCELERATOR:
        write(training, *place, torch.neg)
    list(training.run(1, MovingIteration(plan=MIXED)))
    return training.end()


def is_right() -> bool:
    """Return whether an announced write is forgotten, and another one is noticed, as in the tests above."""
    expected = train_serially(MODEL, [MovingIteration(plan=MIXED)] * 2)
    try:
        if not same(states_after_an_announced_write(), expected[-8:]):
            return False
    except AssertionError:
        return False
    training = MovingTraining(MODEL, MIXED, FakeDevice(Late()))
    list(training.run(0, MovingIteration(plan=MIXED)))
    write(training, 0, 64, 96, torch.neg)
    training.executor.give_states_back()
    return training.executor.failure is not None


def from_params(masters: SplitMasters) -> None:
    for one in masters._ranges.values():
        one.upper_is_param = bool(one.sums)


def without_lower_halves(
    state: UnitState, elements: ElementRange, states: Slot
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    yield state.view(state.exp_avg, elements), state.view(states.exp_avg, elements)
    yield state.view(state.exp_avg_sq, elements), state.view(states.exp_avg_sq, elements)


FAULTS: dict[str, AbstractContextManager[object]] = {
    "parameters are not copied before a known write": mock.patch.object(SplitMasters, "copy_to_host"),
    "an update reads parameters that were written": mock.patch.object(SplitMasters, "begin", from_params),
    "nothing is compared": mock.patch.object(LateChecksum, "compare"),
    "no sums are left behind": mock.patch.object(LateChecksum, "record"),
    "lower halves are not copied": mock.patch.object(UnitState, "copied_states", without_lower_halves),
}


def test_without_a_fault_writes_are_forgotten_or_noticed() -> None:
    assert is_right()


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_of_split_masters_is_noticed(name: str) -> None:
    with FAULTS[name]:
        assert not is_right()
