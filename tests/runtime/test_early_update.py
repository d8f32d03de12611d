"""Check that the early ranges are updated in one call and copied at once, however many there are."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch

from deep_opt_states.device.kernels.adam import RangeUpdate
from deep_opt_states.runtime.early_update import EarlyBuffers
from deep_opt_states.runtime.executor import Executor
from deep_opt_states.runtime.issuer import Issuer
from deep_opt_states.runtime.state import Split, UnitState
from perf_model.schedule.action import Lane
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Workload
from tests.fake_device.device import FakeDevice, LateAdam
from tests.fake_device.fake_worker import FakeWorker
from tests.fake_device.queues import Deadlock
from tests.runtime.hostile import pinned_states
from tests.runtime.plain_adam import PlainAdam, adam_step
from tests.runtime.random_states import NAMES, fill_gradients, make_states, place, update_serially

PLACEMENTS = tuple(Placement)
NUMEL = 60
EARLY = [(3, 4), (10, 15), (20, 33), (50, 60)]


@dataclass
class CopyCountingDevice(FakeDevice):
    """A fake device that counts copies, and kernels that copy many tensors."""

    copies: int = 0
    kernels: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        self.copies += 1
        super().copy(destination, source)

    def copy_each(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.kernels += 1
        super().copy_each(copies)


@dataclass
class CountedCalls:
    """The number of ranges of each call of a kernel."""

    ranges: list[int] = field(default_factory=list)

    def count(self, kernel: Any) -> Any:
        update_ranges = kernel.update_ranges

        def counted(updates: Sequence[RangeUpdate]) -> None:
            self.ranges.append(len(updates))
            update_ranges(updates)

        return mock.patch.object(kernel, "update_ranges", counted)


def early_executor(
    device: FakeDevice, units: int, dtype: torch.dtype, grad_dtypes: Sequence[torch.dtype]
) -> tuple[Executor, list[UnitState], LateAdam, PlainAdam]:
    """Return an executor of ``units`` units of each placement, all with early ranges."""
    numels = [NUMEL] * (units * len(PLACEMENTS))
    states = pinned_states(device, numels, dtype, grad_dtypes=grad_dtypes)
    plan = UpdatePlan(workload=Workload.from_numels(numels), placements=PLACEMENTS * units, num_slots=1)
    place(states, plan.schedule, device)
    on_accelerator, on_host = LateAdam(device, PlainAdam()), PlainAdam()
    splits = [Split.create(state.elements, EARLY) for state in states]
    executor = Executor(
        plan.schedule, states, device, on_host, on_accelerator, worker=FakeWorker(device), splits=splits
    )
    return executor, states, on_accelerator, on_host


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("units", [1, 20])
def test_early_ranges_take_one_call_per_kernel_and_one_copy_each_way(units: int, dtype: torch.dtype) -> None:
    device = CopyCountingDevice()
    count = units * len(PLACEMENTS)
    # Users have set the gradients of some units, in fp32.
    grad_dtypes = [torch.float32 if index % 5 == 0 else torch.bfloat16 for index in range(count)]
    executor, states, on_accelerator, on_host = early_executor(device, units, dtype, grad_dtypes)
    expected = make_states([NUMEL] * count, dtype, grad_dtypes=grad_dtypes)
    for step in (1, 2):
        for those in (states, expected):
            fill_gradients(those, step)
        accelerator_calls, host_calls = CountedCalls(), CountedCalls()
        with (
            accelerator_calls.count(on_accelerator),
            host_calls.count(on_host),
            mock.patch.object(Issuer, "issue"),
        ):
            device.copies = device.kernels = 0
            executor._residents.load()
            loads = device.copies
            executor.begin([adam_step(step)] * count)
            assert (device.copies - loads, device.kernels) == (2, 2)
        assert accelerator_calls.ranges == [units * len(EARLY)]
        assert host_calls.ranges == [2 * units * len(EARLY)]
        executor.finish()
        assert executor.failure is None
        update_serially(expected, PlainAdam(), [adam_step(step)] * count)
        assert all(torch.equal(state.param, other.param) for state, other in zip(states, expected, strict=True))
    executor.give_states_back()
    for state, other in zip(states, expected, strict=True):
        assert all(torch.equal(getattr(state, name), getattr(other, name)) for name in NAMES)


def test_replaced_tensors_are_updated() -> None:
    """Check that views are derived anew when a user sets gradients, and when DeepSpeed reallocates parameters."""
    device = FakeDevice()
    executor, states, _, _ = early_executor(device, 1, torch.bfloat16, [])
    expected = make_states([NUMEL] * len(states), torch.bfloat16)
    for step in (1, 2):
        for state in states:
            state.grad = device.empty(NUMEL, torch.float32) if state.is_on_accelerator else state.grad.clone()
            param = device.empty(NUMEL, torch.bfloat16)
            state.replace_param(param)
        fill_gradients(states, step)
        fill_gradients(expected, step)
        executor.run([adam_step(step)] * len(states))
        update_serially(expected, PlainAdam(), [adam_step(step)] * len(states))
        assert all(torch.equal(state.param, other.param) for state, other in zip(states, expected, strict=True))


def test_gradients_that_were_replaced_are_freed() -> None:
    """Check it for early ranges and for the rest, in slots that are shifted in each update."""
    device = FakeDevice()
    numels = [NUMEL] * 9
    states = pinned_states(device, numels, torch.bfloat16)
    plan = UpdatePlan(
        workload=Workload.from_numels(numels),
        placements=(*PLACEMENTS, Placement.CPU, *[Placement.STREAMED] * 5),
        num_slots=4,
    )
    place(states, plan.schedule, device)
    splits = [Split.create(state.elements, EARLY if index % 2 else []) for index, state in enumerate(states)]
    executor = Executor(
        plan.schedule,
        states,
        device,
        PlainAdam(),
        LateAdam(device, PlainAdam()),
        worker=FakeWorker(device),
        splits=splits,
    )
    own = [state.grad for state in states]
    expected = make_states(numels, torch.bfloat16)
    for step in range(1, 6):
        copies: list[torch.Tensor] = []
        for state in states:
            state.grad = device.empty(NUMEL, torch.float32) if state.is_on_accelerator else torch.empty(NUMEL)
            copies.append(state.grad)
        fill_gradients(states, step)
        fill_gradients(expected, step)
        executor.run([adam_step(step)] * len(states))
        update_serially(expected, PlainAdam(), [adam_step(step)] * len(states))
        assert all(torch.equal(state.param, other.param) for state, other in zip(states, expected, strict=True))
        alive = [weakref.ref(copy) for copy in copies]
        copies.clear()
        for state, grad in zip(states, own, strict=True):
            state.grad = grad
        executor.forget_replaced_tensors()
        assert [reference() for reference in alive] == [None] * len(states)


def test_buffers_that_are_large_enough_are_kept_when_units_give_their_memory_back() -> None:
    """Check that nothing is allocated on an accelerator whose memory is short."""
    device = FakeDevice()
    executor, states, _, _ = early_executor(device, 2, torch.bfloat16, [])
    buffers = executor._early_buffers
    assert buffers is not None
    for state in states:
        state.is_evicted = state.placement is not Placement.CPU
        if state.is_evicted:
            state.grad, state.resident = device.empty_host(NUMEL, torch.float32), None
    allocated_bytes = device.allocated_bytes
    executor.set_units(executor._issuer.schedule, states, [Split.create(state.elements, EARLY) for state in states])
    assert executor._early_buffers is buffers
    assert device.allocated_bytes <= allocated_bytes
    expected = make_states([NUMEL] * len(states), torch.bfloat16)
    fill_gradients(states, 1)
    fill_gradients(expected, 1)
    executor.run([adam_step(1)] * len(states))
    update_serially(expected, PlainAdam(), [adam_step(1)] * len(states))
    assert all(torch.equal(state.param, other.param) for state, other in zip(states, expected, strict=True))


def test_no_buffers_are_reserved_without_early_ranges() -> None:
    assert EarlyBuffers.reserve(FakeDevice(), 0, None) is None


@pytest.mark.parametrize("early", [Lane.PUBLISH, None])
@pytest.mark.parametrize("blocked", [Lane.H2D, Lane.D2H])
def test_prefetches_and_flushes_in_flight_hold_back_neither_the_host_nor_early_ranges(
    blocked: Lane, early: Lane | None
) -> None:
    """Check a step whose prefetches, or the flushes of the step before, make no progress.

    On their lane, early ranges would be updated and published only after them.
    """
    device = FakeDevice()
    executor, states, _, _ = early_executor(device, 3, torch.bfloat16, [])
    count, streams = len(states), executor._lanes.streams
    placements = tuple(state.placement for state in states)
    workload = Workload.from_numels([NUMEL] * count)
    plan = UpdatePlan(workload=workload, placements=placements, num_slots=3)
    executor.set_units(plan.schedule, states, [Split.create(state.elements, EARLY) for state in states])
    expected = make_states([NUMEL] * count, torch.bfloat16)
    is_open = False
    for step in (1, 2):
        for those in (states, expected):
            fill_gradients(those, step)
        update_serially(expected, PlainAdam(), [adam_step(step)] * count)
        if step == 2:
            if blocked is Lane.H2D:
                streams[blocked].queue.add(lambda: None, lambda: is_open)
            executor.prefetch()
            executor._early_update._streams = {**streams, Lane.PUBLISH: streams[early or blocked]}
        executor.begin([adam_step(step)] * count)
        if step == 1:
            if blocked is Lane.D2H:
                streams[blocked].queue.add(lambda: None, lambda: is_open)
            executor.finish_on_stream()
    if early is None:
        assert isinstance(executor.failure, Deadlock)
        return
    executor.advance()
    executor.publish_early_ranges()
    assert executor.failure is None, executor.failure
    early_is_read = device.event()
    device.current_stream().record(early_is_read)
    early_is_read.synchronize()
    for state, other in zip(states, expected, strict=True):
        assert all(torch.equal(state.param[begin:end], other.param[begin:end]) for begin, end in EARLY)
    is_open = True
    executor.finish()
    executor.give_states_back()
    for state, other in zip(states, expected, strict=True):
        assert all(torch.equal(getattr(state, name), getattr(other, name)) for name in NAMES)
