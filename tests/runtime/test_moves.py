"""Check units that move between updates, resident states as a write-back cache, speculated steps, and restarts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st

from deep_opt_states.device.cpu import HostDevice
from deep_opt_states.device.interface import Device
from deep_opt_states.device.kernels.adam import AdamTensors, RangeUpdate
from deep_opt_states.runtime.actions import Actions
from deep_opt_states.runtime.executor import Executor
from deep_opt_states.runtime.issuer import Issuer
from deep_opt_states.runtime.lanes import Waiter
from deep_opt_states.runtime.write_back import StatesElsewhere
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import STATES, Range, Unit, Workload
from tests.kernels.adam_steps import fused
from tests.kernels.intercepted import before_each_update
from tests.runtime.moving import (
    WRITTEN,
    Model,
    MovingIteration,
    MovingTraining,
    iterations_of,
    models,
    random_iterations,
    random_plan,
    train_serially,
)
from tests.runtime.on_software_gpu import SoftwareDevice, faults_of, is_right
from tests.runtime.plain_adam import adam_step
from tests.runtime.random_states import same, with_persistent
from tests.software_gpu.device import memory_allocated
from tests.software_gpu.plugged import plugged
from tests.software_gpu.ranks import on_device

CPU, STREAMED, RESIDENT = Placement.CPU, Placement.STREAMED, Placement.RESIDENT
seeds = st.integers(0, 2**32)


@pytest.mark.P1
@pytest.mark.P2
@on_device
@plugged()
@given(models(), seeds)
def test_units_that_move_between_updates_have_no_race_and_give_the_serial_bits(model: Model, seed: int) -> None:
    iterations = random_iterations(random.Random(seed), model, 6, moves=seed % 4 > 0)
    note(f"{model}\n{iterations}")
    assert faults_of(partial(is_right, model, iterations)) == []
    assert is_right(model, iterations, HostDevice())


@contextmanager
def short_of_memory(device: Device[Any], allocations: int) -> Iterator[None]:
    left = [allocations]

    def allowing(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def empty(*arguments: Any) -> torch.Tensor:
            left[0] -= 1
            if left[0] < 0:
                raise torch.OutOfMemoryError
            return allocate(*arguments)

        return empty

    replaced = {name: allowing(getattr(device, name)) for name in ("empty", "empty_host")}
    with mock.patch.multiple(device, **replaced):
        yield


@pytest.mark.P6
@on_device
@plugged()
@given(models(), seeds, st.integers(0, 20), st.booleans())
def test_a_move_that_lacks_memory_changes_nothing(model: Model, seed: int, allocations: int, prefetches: bool) -> None:
    chance = random.Random(seed)
    before, after = (random_plan(chance, model) for _ in range(2))
    iterations = [
        MovingIteration(plan=before),
        MovingIteration(plan=before, prefetches=prefetches, is_skipped=prefetches),
    ]

    def is_right_after_the_move() -> bool:
        training = MovingTraining(model, before, SoftwareDevice())
        read = [tensor for number, iteration in enumerate(iterations) for tensor in training.run(number, iteration)]
        units, allocated_bytes = training.memory.units, memory_allocated()
        with short_of_memory(training.device, allocations), suppress(torch.OutOfMemoryError):
            training.move(after)
        if training.plan is before and training.memory.units is units:
            assert memory_allocated() == allocated_bytes
        elif training.plan is before:
            # The memory has the new units, but the executor got no slots for them: the plan before is set again.
            training.set_plan(before)
        iterations.extend(MovingIteration(plan=training.plan) for _ in range(2))
        for number in (2, 3):
            read.extend(training.run(number, iterations[number]))
        note(f"{model}\n{iterations}")
        return same([*read, *training.end()], train_serially(model, iterations))

    assert faults_of(is_right_after_the_move) == []


MODEL = Model(numels=(20, 9), persistent=[[(14, 18)], []])
WORKLOAD = Workload((Unit(0, (Range(0, 0, 16),)), Unit(1, (Range(0, 16, 4),)), Unit(2, (Range(1, 0, 9),))))
PLAN, OTHER_PLAN = (
    with_persistent(UpdatePlan(workload=WORKLOAD, placements=placements, num_slots=1), MODEL.persistent)
    for placements in ((RESIDENT, CPU, RESIDENT), (RESIDENT, STREAMED, CPU))
)


def test_resident_states_are_loaded_once_until_the_states_are_given_back() -> None:
    training = MovingTraining(MODEL, PLAN, HostDevice())
    counts = []
    for number in range(4):
        with mock.patch.object(training.device, "copy", wraps=training.device.copy) as copy:
            list(training.run(number, MovingIteration(plan=PLAN, prefetches=number == 1)))
        counts.append(copy.call_count)
        if number == 2:
            with mock.patch.object(training.device, "copy", wraps=training.device.copy) as written:
                training.executor.sync_states_to_host()
                training.executor.sync_states_to_host()
            assert written.call_count == 2 * len(STATES)
    # An iteration after the first one also reads the gradients of both resident units.
    assert counts[3] == counts[0] + 2
    assert counts[1] == counts[2] == counts[0] + 2 - 2 * len(STATES)
    training.end()


@on_device
@plugged()
def test_leaving_out_a_copy_or_a_mark_of_the_resident_states_is_a_fault() -> None:
    iterations = [
        MovingIteration(plan=PLAN, forward=[0, 2]),
        MovingIteration(plan=PLAN, writes_states=True, prefetches=True),
        MovingIteration(plan=OTHER_PLAN),
        MovingIteration(plan=PLAN, writes_states=True),
    ]
    assert faults_of(partial(is_right, MODEL, iterations)) == []
    for method in ("load", "mark_updated", "write_back", "invalidate"):
        with mock.patch.object(StatesElsewhere, method):
            assert faults_of(partial(is_right, MODEL, iterations)), method


KEEP = Issuer.keep_speculations
LEFT_OUT: dict[str, tuple[type, str, Callable[..., None]]] = {
    "no COMMIT": (Actions, "_commit", lambda actions, action: None),
    "all are kept": (Issuer, "keep_speculations", lambda issuer, is_valid: KEEP(issuer, lambda unit: True)),
    "none is forgotten": (Executor, "_forget_speculations", lambda executor: None),
    "no version is written back": (StatesElsewhere, "_write_back_shadows", lambda states: None),
}


@on_device
@plugged()
def test_a_part_of_the_speculation_that_is_left_out_is_a_fault() -> None:
    model = Model(numels=(9, 7, 8, 6, 5), persistent=[])
    workload = Workload.from_numels(list(model.numels))
    plan = UpdatePlan(workload=workload, placements=(CPU, STREAMED, RESIDENT, CPU, CPU), num_slots=1)
    plan = replace(plan, eager=plan.eligible_as_eager)

    def faults(seed: int) -> list[str]:
        return faults_of(partial(is_right, model, iterations_of(random.Random(seed), [plan], 5)))

    assert not any(map(faults, range(20)))
    for name, left_out in LEFT_OUT.items():
        with mock.patch.object(*left_out):
            assert any(map(faults, range(20))), name


def fail_here(training: MovingTraining) -> None:
    """Fail while other lanes update and flush; no copy in flight may reach the states that are loaded next."""
    list(training.run(0, MovingIteration(plan=training.plan)))
    training.backward(1)
    training.executor.prefetch()
    on_cpu = [part.sub_group for unit in training.memory.units if unit.placement is CPU for part in unit.parts]

    updated: list[int] = []

    def fail_in_last(update: RangeUpdate) -> None:
        updated.append(update.sub_group)
        if update.sub_group == on_cpu[-1]:
            raise ZeroDivisionError

    with before_each_update(fail_in_last):
        training.executor.begin([adam_step(2)] * 2)
        training.executor.end()
    assert updated == on_cpu, "the other units were updated before"
    assert isinstance(training.executor.failure, ZeroDivisionError)
    training.executor.sync_states_to_host()


def fail_on_another_rank_after_prefetches(training: MovingTraining) -> None:
    list(training.run(0, MovingIteration(plan=training.plan, prefetches=True, is_skipped=True)))
    # The prefetches may still read the states, to no effect.
    training.executor._lanes.drain()
    training.executor.fail(ZeroDivisionError())


def fail_on_another_rank_with_flushes_in_flight(training: MovingTraining) -> None:
    training.backward(0)
    training.executor.begin([adam_step(1)] * 2)
    training.executor.end(Waiter.STREAM)
    training.executor.fail(ZeroDivisionError())
    training.executor.end()


FAILURES = (fail_here, fail_on_another_rank_after_prefetches, fail_on_another_rank_with_flushes_in_flight)


@pytest.mark.P6
@on_device
@plugged()
def test_the_next_update_after_a_failure_starts_from_the_restored_states() -> None:
    placed = ((RESIDENT, CPU, STREAMED), (STREAMED, CPU, STREAMED), (STREAMED, CPU, CPU))
    for fail, placements, eager in product(FAILURES, placed, ((), (1,))):
        plan = UpdatePlan(workload=WORKLOAD, placements=placements, num_slots=1, eager=frozenset(eager))
        assert faults_of(partial(restarts, plan, fail)) == [], (fail.__name__, placements, eager)


def restarts(plan: UpdatePlan, fail: Callable[[MovingTraining], None]) -> bool:
    """Return whether the update after a failure has the bits that follow from the states that were loaded."""
    training = MovingTraining(MODEL, plan, SoftwareDevice())
    fail(training)
    for tensors in training.memory.sub_groups:
        for name in STATES:
            getattr(tensors, name).fill_(WRITTEN)
    training.executor.clear_failure()
    for kernel in (training.host_adam, training.device_adam):
        kernel.restart()
    list(training.run(2, MovingIteration(plan=plan)))
    kernel = fused()
    states, params = list[torch.Tensor](), list[torch.Tensor]()
    kernel.begin_step([adam_step(3)] * 2)
    for index, gradient in enumerate(MODEL.gradients(2)):
        expected = {name: torch.full_like(gradient, WRITTEN) for name in STATES}
        params.append(torch.empty(gradient.numel(), dtype=MODEL.dtype))
        kernel.update(index, AdamTensors(**expected, grad=gradient, param=params[-1]))
        states += expected.values()
    return same(training.end(), [*states, *params])
