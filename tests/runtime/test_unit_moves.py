"""Check units that are parts of sub-groups, and their moves between updates, under hostile timing.

The bits are those of updating whole sub-groups one after the other, wherever units are cut and placed and whenever they
move.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st

from deep_opt_states.device.cpu import HostDevice
from deep_opt_states.device.interface import Device
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Range, Unit, Workload
from tests.fake_device.device import FakeDevice
from tests.fake_device.timing import Late, Timing
from tests.runtime.hostile import ORDERS, timings
from tests.runtime.moving import (
    Model,
    MovingIteration,
    MovingTraining,
    models,
    random_iterations,
    random_plan,
    train_serially,
)
from tests.runtime.random_states import same

seeds = st.integers(0, 2**32)


def assert_serial_results(model: Model, iterations: list[MovingIteration], device: Device[Any]) -> None:
    note(f"{model}\n{iterations}")
    training = MovingTraining(model, iterations[0].plan, device)
    assert same(training.train(iterations), train_serially(model, iterations))


@pytest.mark.promise("P1", "P2")
@given(models(), seeds, timings)
def test_units_give_the_bits_of_updating_whole_sub_groups(model: Model, seed: int, timing: Timing) -> None:
    chance = random.Random(seed)
    assert_serial_results(model, random_iterations(chance, model, 3, moves=False), FakeDevice(timing))


@given(models(), seeds)
def test_units_give_the_bits_of_whole_sub_groups_on_the_host(model: Model, seed: int) -> None:
    assert_serial_results(model, random_iterations(random.Random(seed), model, 3, moves=False), HostDevice())


@pytest.mark.promise("P1", "P2")
@given(models(), seeds, timings)
def test_units_that_move_between_updates_give_the_serial_bits(model: Model, seed: int, timing: Timing) -> None:
    chance = random.Random(seed)
    assert_serial_results(model, random_iterations(chance, model, 6, moves=True), FakeDevice(timing))


@given(models(), seeds)
def test_units_that_move_give_the_serial_bits_on_the_host(model: Model, seed: int) -> None:
    assert_serial_results(model, random_iterations(random.Random(seed), model, 6, moves=True), HostDevice())


def test_a_move_that_does_not_wait_for_the_update_gives_a_wrong_number() -> None:
    """Check that states which are updated on one stream are written back on another stream after that."""
    model = Model(numels=(40,), persistent=[[]])
    resident, on_cpu = (
        UpdatePlan(workload=Workload((Unit(0, (Range(0, 0, 40),)),)), placements=(placement,), num_slots=1)
        for placement in (Placement.RESIDENT, Placement.CPU)
    )
    iterations = [MovingIteration(plan=resident, overlaps_flushes=True), MovingIteration(plan=on_cpu)]
    found = []
    for waits, order in itertools.product((True, False), ORDERS):
        training = MovingTraining(model, resident, FakeDevice(Late(order)))
        read = list(training.run(0, iterations[0]))
        with nullcontext() if waits else mock.patch.object(training.executor, "end"):
            training.move(on_cpu)
        read.extend(training.run(1, iterations[1]))
        found.append((waits, same([*read, *training.end()], train_serially(model, iterations))))
    assert all(is_same for waits, is_same in found if waits)
    assert not all(is_same for waits, is_same in found if not waits)


@contextmanager
def short_of_memory(device: Device[Any], allocations: int) -> Iterator[None]:
    """Let ``device`` raise its out-of-memory error after that many allocations."""
    left = [allocations]

    def allowing(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def empty(*arguments: Any) -> torch.Tensor:
            left[0] -= 1
            if left[0] < 0:
                raise torch.OutOfMemoryError
            return allocate(*arguments)

        return empty

    with (
        mock.patch.object(device, "empty", allowing(device.empty)),
        mock.patch.object(device, "empty_host", allowing(device.empty_host)),
    ):
        yield


@pytest.mark.promise("P6")
@given(models(), seeds, timings, st.integers(0, 20), st.booleans())
def test_a_move_that_lacks_memory_changes_nothing(
    model: Model, seed: int, timing: Timing, allocations: int, prefetches: bool
) -> None:
    """Check that training goes on with the plan before, and that no memory is lost."""
    chance = random.Random(seed)
    before, after = (random_plan(chance, model) for _ in range(2))
    device = FakeDevice(timing)
    training = MovingTraining(model, before, device)
    iterations = [
        MovingIteration(plan=before),
        MovingIteration(plan=before, prefetches=prefetches, is_skipped=prefetches),
    ]
    read = [tensor for number, iteration in enumerate(iterations) for tensor in training.run(number, iteration)]
    units, allocated_bytes = training.memory.units, device.allocated_bytes
    with short_of_memory(device, allocations), suppress(torch.OutOfMemoryError):
        training.move(after)
    if training.plan is before and training.memory.units is units:
        assert device.allocated_bytes == allocated_bytes
    elif training.plan is before:
        # The memory has the new units, but the executor got no slots for them: it still updates the units before.
        training.memory.units = units
    iterations.extend(MovingIteration(plan=training.plan) for _ in range(2))
    for number in (2, 3):
        read.extend(training.run(number, iterations[number]))
    note(f"{model}\n{iterations}")
    assert same([*read, *training.end()], train_serially(model, iterations))


@given(models(), seeds, timings)
def test_the_plan_before_can_be_set_again_after_a_move_that_lacks_slots(
    model: Model, seed: int, timing: Timing
) -> None:
    chance = random.Random(seed)
    before, after = (random_plan(chance, model) for _ in range(2))
    training = MovingTraining(model, before, FakeDevice(timing))
    iterations = [MovingIteration(plan=before), MovingIteration(plan=before)]
    read = list(training.run(0, iterations[0]))
    with (
        mock.patch.object(training.executor, "load_plan", side_effect=torch.OutOfMemoryError),
        pytest.raises(torch.OutOfMemoryError),
    ):
        training.move(after)
    training.set_plan(before)
    read.extend(training.run(1, iterations[1]))
    assert same([*read, *training.end()], train_serially(model, iterations))


def test_gradients_are_readable_after_each_kind_of_move() -> None:
    model = Model(numels=(40,), persistent=[[]])
    plans = [
        UpdatePlan(workload=Workload((Unit(0, (Range(0, 0, 40),)),)), placements=(placement,), num_slots=1)
        for placement in Placement
    ]
    for before, after in itertools.permutations(plans, 2):
        training = MovingTraining(model, before, FakeDevice(Late()))
        list(training.run(0, MovingIteration(plan=before)))
        training.move(after)
        assert torch.equal(training.read_gradients(), model.gradients(0)[0]), (before, after)
