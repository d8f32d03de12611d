"""Run iterations whose update overlaps with the next forward, on the fake device, and the same iterations serially."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from deep_opt_states.device.cpu import HostDevice
from deep_opt_states.runtime.executor import Executor, Waiter
from deep_opt_states.runtime.state import UnitState
from perf_model.schedule.plan import UpdatePlan
from tests.fake_device.device import FakeDevice, FakeStream
from tests.fake_device.fake_worker import FakeWorker
from tests.fake_device.timing import Timing
from tests.runtime.hostile import LateAdam, pinned_states
from tests.runtime.plain_adam import PlainAdam, adam_step
from tests.runtime.random_states import (
    cut,
    fill_gradients,
    gradients,
    make_states,
    place,
    tensors_of,
    update_serially,
    with_persistent,
)

WRITTEN = 0.5
"""The value that a user writes to a parameter in place, after a step."""


@dataclass(kw_only=True)
class Habits:
    """The behaviour of a training script, drawn by ``seed``: the order of forward, its pauses, and its prefetches."""

    seed: int
    prefetches: bool = True
    writes: bool = True
    """Whether the script writes to persistent parameters after each step. The next update overwrites them."""
    persistent: list[list[tuple[int, int]]] = field(default_factory=list)
    """The ranges of the persistent parameters in each sub-group."""
    grad_dtypes: list[torch.dtype] = field(default_factory=list)
    """The dtype of each sub-group's gradients, fp32 if users set them. If the list is empty, all gradients are fp32."""
    params_on_host: bool = False
    eager: bool = False
    """Whether units on the CPU are eager. Some of their steps are speculated, some of these for other steps."""
    overlaps_flushes: bool = True
    """Whether some updates end on the caller's stream only, with flushes in flight."""


def deferred(
    plan: UpdatePlan, timing: Timing, habits: Habits, steps: int = 3, dtype: torch.dtype = torch.bfloat16
) -> list[torch.Tensor]:
    """Return all parameters that were read, in order, and all states at the end, with deferred updates.

    Each unit of ``plan`` is a whole sub-group, from which the persistent ranges are taken.
    """
    numels = [unit.numel for unit in plan.workload.units]
    plan = with_persistent(plan, habits.persistent)
    plan = replace(plan, eager=plan.eligible_as_eager if habits.eager else frozenset())
    device = FakeDevice(timing)
    gathers = device.stream()
    whole = pinned_states(device, numels, dtype, grad_dtypes=habits.grad_dtypes, params_on_host=habits.params_on_host)
    states = cut(whole, plan.workload, device)
    place(states, plan.schedule, device)
    executor = Executor(
        plan.schedule,
        states,
        device,
        PlainAdam(),
        LateAdam(device, PlainAdam()),
        worker=FakeWorker(device),
    )
    chance = random.Random(habits.seed)
    read: list[torch.Tensor] = []
    for step in range(1, steps + 1):
        for state, gradient in zip(whole, gradients(numels, step), strict=True):
            (part,) = state.parts
            read.append(on_device_copy(device, part.param))
            device.copy(part.grad, device.empty(state.length, torch.float32).copy_(gradient))
        if habits.prefetches:
            executor.prefetch()
            if chance.random() < 0.2:
                executor.sync_states_to_host()
        if habits.eager:
            speculate(executor, device, sorted(plan.eager), step, len(numels), random.Random(habits.seed + step))
        executor.begin([adam_step(step)] * len(numels))
        if plan.workload.persistent_unit is not None:
            executor.publish(0)
            read.extend(touch_persistent_params(device, states[0], habits))
        read.extend(forward(executor, device, gathers, states, chance, habits.writes))
        if habits.overlaps_flushes and (habits.seed + step) % 3 > 0:
            executor.end(Waiter.STREAM)
        else:
            executor.end()
        assert executor.failure is None, executor.failure
    executor.sync_states_to_host()
    all_read = device.event()
    device.current_stream().record(all_read)
    all_read.synchronize()
    return [*read, *tensors_of(whole)]


def speculate(
    executor: Executor, device: FakeDevice, eager: Sequence[int], step: int, sub_groups: int, chance: random.Random
) -> None:
    """Start the steps of some eager units, of the right step or of another one, and give the states back, or not.

    A step that is speculated for other hyperparameters, or before the states are given back, is in vain.
    """
    ready = device.event()
    device.current_stream().record(ready)
    for grad_scale in chance.choice([(), (0.5,), (0.5,), (0.25,), (0.25, 0.5), (0.5, 0.25)]):
        units = [unit for unit in eager if chance.random() < 0.7]
        executor.speculate(units, [adam_step(step, grad_scale)] * sub_groups, ready)
        if chance.random() < 0.2:
            executor.sync_states_to_host()
        if chance.random() < 0.2:
            executor.forget_speculations(units[:1])


def touch_persistent_params(device: FakeDevice, state: UnitState, habits: Habits) -> Iterator[torch.Tensor]:
    """Yield copies of the persistent parameters, and write to them if ``habits.writes``."""
    for part in state.parts:
        yield on_device_copy(device, part.param)
        if habits.writes:
            device.launch(lambda written: written.fill_(WRITTEN), part.param)


def forward(
    executor: Executor,
    device: FakeDevice,
    gathers: FakeStream,
    states: Sequence[UnitState],
    chance: random.Random,
    writes: bool,
) -> Iterator[torch.Tensor]:
    """Yield copies of the parameters that a forward reads: of most units, of some twice.

    A separate stream gathers the parameters, and the caller's stream reads them there.
    """
    order = chance.choices(range(len(states)), k=len(states))
    written, done = device.event(), device.event()
    device.current_stream().record(written)
    # The script orders the gathers behind its own writes. It does not order them behind our publications.
    if writes:
        gathers.wait(written)
    for index in order if chance.random() < 0.5 else sorted(order):
        if chance.random() < 0.5:
            executor.advance()
        with gathers.issue():
            executor.publish(index)
            gathered = [on_device_copy(device, part.param) for part in states[index].parts]
        gathers.record(done)
        device.current_stream().wait(done)
        for tensor in gathered:
            device.record_stream(tensor, device.current_stream())
            yield on_device_copy(device, tensor)


def on_device_copy(device: FakeDevice, tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of ``tensor`` in device memory, issued on the current stream."""
    copied = device.empty(tensor.numel(), tensor.dtype)
    device.copy(copied, tensor)
    return copied


def serial(plan: UpdatePlan, habits: Habits, steps: int = 3, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """Return the tensors that ``deferred`` returns, with every update finished before training continues."""
    numels = [unit.numel for unit in plan.workload.units]
    whole = make_states(numels, dtype, grad_dtypes=habits.grad_dtypes)
    workload = with_persistent(plan, habits.persistent).workload
    states = cut(whole, workload, HostDevice())
    chance = random.Random(habits.seed)
    read: list[torch.Tensor] = []
    for step in range(1, steps + 1):
        read.extend(param.clone() for param in tensors_of(whole, ["param"]))
        fill_gradients(whole, step)
        if habits.prefetches:
            chance.random()
        update_serially(whole, PlainAdam(), [adam_step(step)] * len(numels))
        for part in states[0].parts if workload.persistent_unit is not None else ():
            read.append(part.param.clone())
            if habits.writes:
                part.param.fill_(WRITTEN)
        order = chance.choices(range(len(states)), k=len(states))
        for index in order if chance.random() < 0.5 else sorted(order):
            chance.random()
            read.extend(part.param.clone() for part in states[index].parts)
    return [*read, *tensors_of(whole)]
