"""Run iterations whose update overlaps with the next forward, on the fake device, and the same iterations serially."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from deep_opt_states.runtime.executor import Executor
from deep_opt_states.runtime.state import Split, UnitState
from perf_model.schedule.plan import UpdatePlan
from tests.fake_device.device import FakeDevice, FakeStream
from tests.fake_device.fake_worker import FakeWorker
from tests.fake_device.timing import Timing
from tests.runtime.hostile import LateAdam, pinned_states
from tests.runtime.plain_adam import PlainAdam, adam_step
from tests.runtime.random_states import NAMES, fill_gradients, gradients, make_states, place, update_serially

WRITTEN = 0.5
"""The value that a user writes to a parameter in place, after a step."""


@dataclass(kw_only=True)
class Habits:
    """The behaviour of a training script, drawn by ``seed``: the order of forward, its pauses, and its prefetches."""

    seed: int
    prefetches: bool = True
    writes: bool = True
    """Whether the script writes to the parameters of early ranges after each step. The next update overwrites them."""
    splits: list[list[tuple[int, int]]] = field(default_factory=list)
    """The early ranges of each unit, in elements of its sub-group."""
    grad_dtypes: list[torch.dtype] = field(default_factory=list)
    """The dtype of each unit's gradients, fp32 if users set them. If the list is empty, all gradients are fp32."""
    params_on_host: bool = False
    overlaps_flushes: bool = True
    """Whether some updates end on the caller's stream only, with flushes in flight."""


def deferred(
    plan: UpdatePlan, timing: Timing, habits: Habits, steps: int = 3, dtype: torch.dtype = torch.bfloat16
) -> list[torch.Tensor]:
    """Return all parameters that were read, in order, and all states at the end, with deferred updates."""
    numels = [unit.numel for unit in plan.workload.units]
    device = FakeDevice(timing)
    gathers = device.stream()
    states = pinned_states(device, numels, dtype, grad_dtypes=habits.grad_dtypes, params_on_host=habits.params_on_host)
    splits = [Split.create(state.elements, early) for state, early in zip(states, habits.splits, strict=True)]
    place(states, plan.schedule, device)
    executor = Executor(
        plan.schedule,
        states,
        device,
        PlainAdam(),
        LateAdam(device, PlainAdam()),
        worker=FakeWorker(device),
        splits=splits,
    )
    chance = random.Random(habits.seed)
    read: list[torch.Tensor] = []
    for step in range(1, steps + 1):
        for state, gradient in zip(states, gradients(numels, step), strict=True):
            read.append(on_device_copy(device, state.param))
            device.copy(state.grad, device.empty(state.numel, torch.float32).copy_(gradient))
        if habits.prefetches:
            executor.prefetch()
            if chance.random() < 0.2:
                executor.give_states_back()
        executor.begin([adam_step(step)] * len(numels))
        read.extend(touch_early_ranges(device, states, splits, habits))
        read.extend(forward(executor, device, gathers, states, chance, habits.writes))
        if habits.overlaps_flushes and (habits.seed + step) % 3 > 0:
            executor.finish_on_stream()
        else:
            executor.finish()
        assert executor.failure is None, executor.failure
    executor.give_states_back()
    all_read = device.event()
    device.current_stream().record(all_read)
    all_read.synchronize()
    return [*read, *(getattr(state, name) for state in states for name in NAMES)]


def touch_early_ranges(
    device: FakeDevice, states: Sequence[UnitState], splits: Sequence[Split], habits: Habits
) -> Iterator[torch.Tensor]:
    """Yield copies of the early ranges' parameters, and write to the parameters if ``habits.writes``."""
    for state, split in zip(states, splits, strict=True):
        for element_range in split.early:
            param = element_range.view(state.param)
            yield on_device_copy(device, param)
            if habits.writes:
                device.launch(lambda written: written.fill_(WRITTEN), param)


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
            executor.publish_early_ranges()
            executor.publish(index)
            gathered = on_device_copy(device, states[index].param)
        gathers.record(done)
        device.current_stream().wait(done)
        device.record_stream(gathered, device.current_stream())
        yield on_device_copy(device, gathered)


def on_device_copy(device: FakeDevice, tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of ``tensor`` in device memory, issued on the current stream."""
    copied = device.empty(tensor.numel(), tensor.dtype)
    device.copy(copied, tensor)
    return copied


def serial(plan: UpdatePlan, habits: Habits, steps: int = 3, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """Return the tensors that ``deferred`` returns, with every update finished before training continues."""
    numels = [unit.numel for unit in plan.workload.units]
    states = make_states(numels, dtype, grad_dtypes=habits.grad_dtypes)
    splits = [Split.create(state.elements, early) for state, early in zip(states, habits.splits, strict=True)]
    chance = random.Random(habits.seed)
    read: list[torch.Tensor] = []
    for step in range(1, steps + 1):
        read.extend(state.param.clone() for state in states)
        fill_gradients(states, step)
        if habits.prefetches:
            chance.random()
        update_serially(states, PlainAdam(), [adam_step(step)] * len(numels))
        for state, split in zip(states, splits, strict=True):
            for element_range in split.early:
                read.append(element_range.view(state.param).clone())
                if habits.writes:
                    element_range.view(state.param).fill_(WRITTEN)
        order = chance.choices(range(len(states)), k=len(states))
        for index in order if chance.random() < 0.5 else sorted(order):
            chance.random()
            read.append(states[index].param.clone())
    return [*read, *(getattr(state, name) for state in states for name in NAMES)]
