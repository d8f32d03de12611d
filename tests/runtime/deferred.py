"""Iterations whose update goes on in the next forward, on the fake device, beside what a serial update gives."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from deep_opt_states.runtime.executor import Executor
from deep_opt_states.runtime.state import Split, SubGroupState
from perf_model.schedule.plan import UpdatePlan
from tests.fake_device.device import FakeDevice, FakeStream
from tests.fake_device.timing import Timing
from tests.fake_device.worker import FakeWorker
from tests.runtime.adam import PlainAdam, adam_step
from tests.runtime.hostile import LateAdam, pinned_states
from tests.runtime.states import NAMES, fill_gradients, gradients, make_states, update_serially

WRITTEN = 0.5
"""What a user writes to a parameter in place, after a step."""


@dataclass(kw_only=True)
class Habits:
    """What a script does, drawn by ``seed``: the order of forward, when it pauses, whether it prefetches."""

    seed: int
    prefetches: bool = True
    writes: bool = True
    """To the first parts' parameters, after each step; the next update replaces what it has written."""
    splits: list[list[tuple[int, int]]] = field(default_factory=list)
    """The first parts of each sub-group."""
    grad_dtypes: list[torch.dtype] = field(default_factory=list)
    """Of each sub-group: gradients that users set are fp32, others are not. Without them all are fp32."""
    params_on_host: bool = False


def deferred(
    plan: UpdatePlan, timing: Timing, habits: Habits, steps: int = 3, dtype: torch.dtype = torch.bfloat16
) -> list[torch.Tensor]:
    """All that was read of the parameters, and all states at the end."""
    numels = [sub_group.numel for sub_group in plan.workload.sub_groups]
    device = FakeDevice(timing)
    gathers = device.stream()
    states = pinned_states(device, numels, dtype, grad_dtypes=habits.grad_dtypes, params_on_host=habits.params_on_host)
    splits = [Split.of(numel, first) for numel, first in zip(numels, habits.splits, strict=True)]
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
                executor.discard()
        executor.begin([adam_step(step)] * len(numels))
        read.extend(touch_first_parts(device, states, splits, habits))
        read.extend(forward(executor, device, gathers, states, chance, habits.writes))
        executor.finish()
        assert executor.failure is None, executor.failure
    all_read = device.event()
    device.current_stream().record(all_read)
    all_read.synchronize()
    return [*read, *(getattr(state, name) for state in states for name in NAMES)]


def touch_first_parts(
    device: FakeDevice, states: Sequence[SubGroupState], splits: Sequence[Split], habits: Habits
) -> Iterator[torch.Tensor]:
    for state, split in zip(states, splits, strict=True):
        for part in split.first:
            param = part.view(state.param)
            yield on_device_copy(device, param)
            if habits.writes:
                device.launch(lambda its: its.fill_(WRITTEN), param)


def forward(
    executor: Executor,
    device: FakeDevice,
    gathers: FakeStream,
    states: Sequence[SubGroupState],
    chance: random.Random,
    writes: bool,
) -> Iterator[torch.Tensor]:
    """Most sub-groups, some twice; what a stream of its own gathers, the caller's then reads."""
    order = chance.choices(range(len(states)), k=len(states))
    written, done = device.event(), device.event()
    device.current_stream().record(written)
    # For what the script has written, by itself; not for what we have published.
    if writes:
        gathers.wait(written)
    for index in order if chance.random() < 0.5 else sorted(order):
        if chance.random() < 0.5:
            executor.advance()
        with gathers.issue():
            executor.publish_first_parts()
            executor.publish(index)
            gathered = on_device_copy(device, states[index].param)
        gathers.record(done)
        device.current_stream().wait(done)
        device.record_stream(gathered, device.current_stream())
        yield on_device_copy(device, gathered)


def on_device_copy(device: FakeDevice, tensor: torch.Tensor) -> torch.Tensor:
    copied = device.empty(tensor.numel(), tensor.dtype)
    device.copy(copied, tensor)
    return copied


def serial(plan: UpdatePlan, habits: Habits, steps: int = 3, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """The same habits, each update done before anything goes on."""
    numels = [sub_group.numel for sub_group in plan.workload.sub_groups]
    states = make_states(numels, dtype, grad_dtypes=habits.grad_dtypes)
    splits = [Split.of(numel, first) for numel, first in zip(numels, habits.splits, strict=True)]
    chance = random.Random(habits.seed)
    read: list[torch.Tensor] = []
    for step in range(1, steps + 1):
        read.extend(state.param.clone() for state in states)
        fill_gradients(states, step)
        if habits.prefetches:
            chance.random()
        update_serially(states, PlainAdam(), [adam_step(step)] * len(numels))
        for state, split in zip(states, splits, strict=True):
            for part in split.first:
                read.append(part.view(state.param).clone())
                if habits.writes:
                    part.view(state.param).fill_(WRITTEN)
        order = chance.choices(range(len(states)), k=len(states))
        for index in order if chance.random() < 0.5 else sorted(order):
            chance.random()
            read.append(states[index].param.clone())
    return [*read, *(getattr(state, name) for state in states for name in NAMES)]


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
