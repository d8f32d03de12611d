"""Check the fake device itself: it has CUDA's order and CUDA's copies, and poisons memory freed while in use."""

from __future__ import annotations

from itertools import permutations
from unittest import mock

import pytest
import torch

from deep_opt_states.runtime.executor import Executor
from deep_opt_states.runtime.failure import UpdateFailed
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Workload
from tests.fake_device.device import FakeDevice, FakeStream, LateAdam
from tests.fake_device.fake_worker import FakeWorker
from tests.fake_device.queues import Deadlock
from tests.fake_device.timing import Late, Seeded
from tests.runtime.hostile import pinned_states
from tests.runtime.plain_adam import PlainAdam, adam_step
from tests.runtime.random_states import fill_gradients, place
from tests.runtime.whole_update import run_update


def finish(device: FakeDevice, stream: FakeStream) -> None:
    end = device.event()
    stream.record(end)
    end.synchronize()


# Order


def test_work_happens_only_when_the_host_waits() -> None:
    device = FakeDevice()
    stream = device.stream()
    pinned, on_device = device.empty_host(2, torch.float32).fill_(1), device.empty(2, torch.float32)
    assert on_device.isnan().all()
    with stream.issue():
        device.copy(on_device, pinned)
    pinned.fill_(2)
    assert on_device.isnan().all()
    finish(device, stream)
    assert on_device.tolist() == [2, 2], "an asynchronous copy reads its source when it runs"


@pytest.mark.parametrize("timing", [*map(Late, permutations(range(2))), *map(Seeded, range(20))], ids=repr)
def test_streams_keep_their_order_and_wait_for_events(timing: Late | Seeded) -> None:
    device = FakeDevice(timing)
    first, second = device.stream(), device.stream()
    event = device.event()
    seen: list[str] = []
    with first.issue():
        device.launch(seen.append, "a")
        device.launch(seen.append, "b")
    first.record(event)
    second.wait(event)
    with second.issue():
        device.launch(seen.append, "c")
    finish(device, second)
    assert seen == ["a", "b", "c"]


def test_seeds_find_every_interleaving_and_the_same_seed_the_same() -> None:
    def interleaving(seed: int) -> str:
        device = FakeDevice(Seeded(seed))
        streams = device.stream(), device.stream()
        seen: list[str] = []
        for letter, stream in zip("abAB", (*streams, *streams), strict=True):
            with stream.issue():
                device.launch(seen.append, letter)
        for stream in streams:
            finish(device, stream)
        return "".join(seen)

    found = {interleaving(seed) for seed in range(200)}
    assert found == {"aAbB", "abAB", "abBA", "baAB", "baBA", "bBaA"}
    assert all(interleaving(seed) == interleaving(seed) for seed in range(20))


def test_a_wait_is_for_the_last_record_before_it_and_work_that_cannot_finish_is_a_deadlock() -> None:
    device = FakeDevice()
    first, second = device.stream(), device.stream()
    event = device.event()
    event.synchronize()
    second.wait(event)
    first.record(event)
    second.wait(event)
    first.queue.add(lambda: None, ready=lambda: False)
    first.record(event)
    finish(device, second)
    with pytest.raises(Deadlock):
        finish(device, first)


def test_the_cpu_lane_runs_one_task_at_a_time_also_while_one_waits() -> None:
    device = FakeDevice(Late([1, 0]))
    worker, stream, event = FakeWorker(device), device.stream(), device.event()
    seen: list[str] = []
    with stream.issue():
        device.launch(seen.append, "stream")
    stream.record(event)

    def waiting() -> None:
        seen.append("begin")
        event.synchronize()
        seen.append("end")

    worker.submit(waiting)
    worker.submit(lambda: seen.append("next")).result()
    assert seen == ["begin", "stream", "end", "next"]


def test_the_current_stream_is_the_one_that_is_issued_on() -> None:
    device = FakeDevice()
    stream = device.stream()
    assert device.current_stream() is device.caller
    with stream.issue():
        assert device.current_stream() is stream
    assert device.current_stream() is device.caller


# Copies


def test_copies_with_pageable_memory_arrive_late_and_stage_their_source() -> None:
    device = FakeDevice()
    stream = device.stream()
    on_device, source, destination = device.empty(2, torch.float32), torch.ones(2), torch.zeros(2)
    with stream.issue():
        device.copy(on_device, source)
        device.copy(destination, on_device)
    source.fill_(2)
    assert on_device.isnan().all()
    assert destination.tolist() == [0, 0]
    finish(device, stream)
    assert on_device.tolist() == destination.tolist() == [1, 1]


def test_copies_convert_and_kernels_cannot_reach_pageable_memory() -> None:
    device = FakeDevice()
    low, high = device.empty(1, torch.bfloat16), device.empty(1, torch.float32).fill_(1.001)
    device.copy(low, high)
    finish(device, device.caller)
    assert low.item() == 1
    with pytest.raises(AssertionError, match="illegal memory access"):
        device.launch(torch.Tensor.mul_, torch.ones(1), 2)


# Memory that is freed


@pytest.mark.parametrize("recorded", [False, True])
def test_device_memory_freed_before_another_stream_is_done_with_it_is_poisoned_unless_recorded(recorded: bool) -> None:
    device = FakeDevice()
    stream = device.stream()
    result, scratch = device.empty(2, torch.float32), device.empty(4, torch.float32).fill_(7)
    with stream.issue():
        device.copy(result, scratch[2:])
    if recorded:
        device.record_stream(scratch[1:], stream)
    del scratch
    finish(device, stream)
    assert result.isnan().all().item() is not recorded


def test_pinned_memory_is_recorded_by_copies_and_not_by_kernels() -> None:
    device = FakeDevice()
    stream = device.stream()
    copied, computed = device.empty(2, torch.float32), device.empty(2, torch.float32)
    for_the_copy = device.empty_host(2, torch.float32).fill_(5)
    for_the_kernel = device.empty_host(2, torch.float32).fill_(5)
    with stream.issue():
        device.copy(copied, for_the_copy)
        device.launch(torch.Tensor.copy_, computed, for_the_kernel)
    del for_the_copy, for_the_kernel
    finish(device, stream)
    assert copied.tolist() == [5, 5]
    assert computed.isnan().all()


def test_a_copy_to_memory_that_was_freed_before_is_an_error() -> None:
    device = FakeDevice(Late([0]))
    stream = device.stream()
    pinned, freed = device.empty_host(2, torch.float32).fill_(1), device.empty(2, torch.float32)
    with stream.issue():
        device.copy(freed, pinned)
    del freed
    with pytest.raises(AssertionError, match="memory that was freed before"):
        finish(device, stream)


# A failure, with work in flight


def test_a_failed_update_leaves_nothing_in_flight() -> None:
    """Check it because a flush in flight would write from freed slots to states that have been loaded since."""
    plan = UpdatePlan(
        workload=Workload.from_numels([3, 4]), placements=(Placement.CPU, Placement.STREAMED), num_slots=1
    )
    # The CPU lane is served first: its failure is seen before anything that was issued on a stream has happened.
    device = FakeDevice(Late([3, 0, 1, 2]))
    states = pinned_states(device, (3, 4), torch.bfloat16)
    failing = mock.create_autospec(PlainAdam, instance=True)
    failing.update_ranges.side_effect = ZeroDivisionError
    place(states, plan.schedule, device)
    executor = Executor(
        plan.schedule, states, device, failing, LateAdam(device, PlainAdam()), worker=FakeWorker(device)
    )
    fill_gradients(states, 1)
    with pytest.raises(UpdateFailed):
        run_update(executor, [adam_step(1)] * 2)
    loaded = [state.parts[0].master.fill_(9) for state in states]
    executor.close()
    device.lanes.run_until(device.lanes.idle)
    assert all((master == 9).all() for master in loaded)
