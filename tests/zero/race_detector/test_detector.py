"""Test the race detector itself, on programs whose order is known."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch

from deep_opt_states.device import cuda
from tests.zero.race_detector.accelerator import RecordingAccelerator
from tests.zero.race_detector.collectives import recorded_collective
from tests.zero.race_detector.detector import FREED, ILLEGAL, UNORDERED, Recorder
from tests.zero.race_detector.device_views import DeviceViews
from tests.zero.race_detector.instrumentation import torch_for_our_device
from tests.zero.race_detector.operations import OperationRecorder

ACCELERATOR = torch.device("cpu", 0)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def accelerator(recorder: Recorder) -> Iterator[RecordingAccelerator]:
    views = DeviceViews(recorder)
    with views.patched_tensors(), OperationRecorder(recorder):
        yield RecordingAccelerator(recorder, views)


def rules(recorder: Recorder) -> list[str]:
    recorder.check_freed()
    return [finding.rule for finding in recorder.findings]


# Order


@pytest.mark.parametrize("how", ["nothing", "wait_stream", "event", "synchronize", "device", "reversed wait_stream"])
def test_streams_are_ordered_by_waits_only(how: str, accelerator: RecordingAccelerator, recorder: Recorder) -> None:
    first, second = accelerator.Stream(), accelerator.Stream()
    tensor = torch.empty(4, device=ACCELERATOR)
    accelerator.synchronize()
    with accelerator.stream(first):
        tensor.fill_(1)
    if how == "wait_stream":
        second.wait_stream(first)
    elif how == "event":
        second.wait_event(first.record_event())
    elif how == "synchronize":
        first.synchronize()
    elif how == "device":
        accelerator.synchronize()
    elif how == "reversed wait_stream":
        first.wait_stream(second)
    with accelerator.stream(second):
        tensor + 1
    first.synchronize()
    second.synchronize()
    assert rules(recorder) == ([UNORDERED] if how in ("nothing", "reversed wait_stream") else [])


def test_an_event_orders_only_the_operations_before_its_record(
    accelerator: RecordingAccelerator, recorder: Recorder
) -> None:
    first, second = accelerator.Stream(), accelerator.Stream()
    tensor = torch.empty(4, device=ACCELERATOR)
    accelerator.synchronize()
    event = accelerator.Event()
    event.wait(second)
    with accelerator.stream(first):
        event.record()
        tensor.fill_(1)
    second.wait_event(event)
    with accelerator.stream(second):
        tensor.fill_(2)
    assert UNORDERED in rules(recorder)


@pytest.mark.parametrize("waits", [False, True])
def test_another_stream_must_wait_for_the_stream_that_allocated_the_memory(
    waits: bool, accelerator: RecordingAccelerator, recorder: Recorder
) -> None:
    """Check the first use: the allocator reuses freed memory of a stream while that stream's kernels are in flight."""
    own, other = accelerator.Stream(), accelerator.Stream()
    with accelerator.stream(own):
        tensor = torch.empty(4, device=ACCELERATOR)
    if waits:
        other.wait_stream(own)
    with accelerator.stream(other):
        tensor.fill_(1)
    assert rules(recorder) == ([] if waits else [UNORDERED])


def test_two_reads_do_not_conflict_and_neither_do_writes_to_different_bytes(
    accelerator: RecordingAccelerator, recorder: Recorder
) -> None:
    first, second = accelerator.Stream(), accelerator.Stream()
    tensor = torch.zeros(4, device=ACCELERATOR)
    accelerator.synchronize()
    for stream in (first, second):
        with accelerator.stream(stream):
            tensor.sum()
    accelerator.synchronize()
    for stream, part in ((first, tensor[:2]), (second, tensor[2:])):
        with accelerator.stream(stream):
            part.fill_(1)
    assert rules(recorder) == []


def test_a_write_after_an_unordered_read_on_another_stream_is_a_finding(
    accelerator: RecordingAccelerator, recorder: Recorder
) -> None:
    tensor = torch.zeros(4, device=ACCELERATOR)
    accelerator.synchronize()
    with accelerator.stream(accelerator.Stream()):
        tensor.sum()
    tensor.fill_(1)
    (finding,) = recorder.findings
    assert finding.rule == UNORDERED
    assert finding.sides[0].startswith("read on stream 1")
    assert finding.sides[1].startswith("write on default stream")


def test_threads_are_ordered_only_by_explicit_synchronization(
    accelerator: RecordingAccelerator, recorder: Recorder
) -> None:
    tensor = torch.zeros(4)
    on_another_thread(recorder, lambda: tensor.fill_(1))
    assert rules(recorder) == [UNORDERED]
    recorder.order_after(recorder.host, recorder.snapshot("host other"))
    tensor.fill_(2)
    assert rules(recorder) == [UNORDERED]


# Waits of the host

WAITS: dict[str, Callable[[torch.Tensor, RecordingAccelerator], object]] = {
    "item": lambda tensor, _: tensor[0].item(),
    "bool": lambda tensor, _: bool(tensor[0]),
    "float": lambda tensor, _: float(tensor[0]),
    "tolist": lambda tensor, _: tensor.tolist(),
    "nonzero": lambda tensor, _: tensor.nonzero(),
    "equal": lambda tensor, _: torch.equal(tensor, tensor + 0),
    "cpu": lambda tensor, _: tensor.cpu(),
    "another dtype": lambda tensor, _: tensor.to("cpu", torch.bfloat16),
    "copy to the host": lambda tensor, _: torch.zeros(4).copy_(tensor),
    "copy from the host": lambda tensor, _: tensor.copy_(torch.zeros(4)),
    "assignment": lambda tensor, _: tensor.__setitem__(0, 1.0),
    "stream": lambda _, accelerator: accelerator.current_stream().synchronize(),
    "event": lambda _, accelerator: accelerator.current_stream().record_event().synchronize(),
    "accelerator": lambda _, accelerator: accelerator.synchronize(),
}


@pytest.mark.parametrize("how", WAITS)
def test_a_wait_of_the_host_is_recorded_once_and_orders_later_operations(
    how: str, accelerator: RecordingAccelerator, recorder: Recorder
) -> None:
    tensor = torch.ones(4, device=ACCELERATOR)
    assert recorder.waits == []
    WAITS[how](tensor, accelerator)
    assert len(recorder.waits) == 1
    assert "<lambda>" in recorder.waits[0]
    # The new stream is ordered after the host only, so that this write tests the wait of the host.
    with accelerator.stream(accelerator.Stream()):
        tensor.fill_(2)
    assert rules(recorder) == []


def test_other_operations_do_not_make_the_host_wait(accelerator: RecordingAccelerator, recorder: Recorder) -> None:
    tensor = torch.ones(4, device=ACCELERATOR)
    second = accelerator.Stream()
    second.wait_stream(accelerator.current_stream())
    second.wait_event(accelerator.current_stream().record_event())
    tensor.to("cpu", non_blocking=True)
    tensor[0].fill_(True)
    tensor.copy_(tensor + 1)
    on_host = torch.ones(4)
    assert (on_host.sum().item(), bool(on_host[0]), on_host.tolist()) == (4, True, [1, 1, 1, 1])
    assert recorder.waits == []


# Copies


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("non_blocking", [True, False])
def test_only_a_blocking_copy_to_the_host_is_complete_when_it_returns(
    dtype: torch.dtype, pinned: bool, non_blocking: bool, accelerator: RecordingAccelerator, recorder: Recorder
) -> None:
    source, destination = torch.ones(4, device=ACCELERATOR, dtype=dtype), torch.zeros(4)
    if pinned:
        destination = accelerator.pin_memory(destination)
    destination.copy_(source, non_blocking=non_blocking)
    destination + 1
    assert rules(recorder) == ([UNORDERED] if non_blocking else [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("pinned", "non_blocking", "safe"), [(True, True, False), (True, False, True), (False, True, True)]
)
def test_a_copy_from_the_host_has_read_its_source_if_it_blocks_or_the_source_is_pageable(
    dtype: torch.dtype,
    pinned: bool,
    non_blocking: bool,
    safe: bool,
    accelerator: RecordingAccelerator,
    recorder: Recorder,
) -> None:
    source = accelerator.pin_memory(torch.ones(4)) if pinned else torch.ones(4)
    source.to(ACCELERATOR, dtype=dtype, non_blocking=non_blocking)
    source.fill_(2)
    assert (rules(recorder) == []) is safe


@pytest.mark.parametrize("pinned", [True, False])
def test_a_copy_from_the_host_does_not_wait_for_the_stream_before_it_reads(
    pinned: bool, accelerator: RecordingAccelerator, recorder: Recorder
) -> None:
    source = torch.zeros(4)
    if pinned:
        source = accelerator.pin_memory(source)
    source.copy_(torch.ones(4, device=ACCELERATOR), non_blocking=True)
    # The host reads the source at once: it converts for a blocking copy, and stages pageable memory.
    source.to(ACCELERATOR, dtype=torch.bfloat16)
    assert rules(recorder) == [UNORDERED]


def test_a_new_tensor_of_an_asynchronous_copy_to_the_host_is_not_complete_yet(
    accelerator: RecordingAccelerator, recorder: Recorder
) -> None:
    copied = torch.ones(4, device=ACCELERATOR).to("cpu", non_blocking=True)
    copied + 1
    assert rules(recorder) == [UNORDERED]


def test_reading_a_number_waits_for_the_stream(accelerator: RecordingAccelerator, recorder: Recorder) -> None:
    pinned = accelerator.pin_memory(torch.zeros(1))
    tensor = torch.ones(1, device=ACCELERATOR)
    pinned.copy_(tensor, non_blocking=True)
    assert tensor.item() == 1
    assert pinned.item() == 1
    assert rules(recorder) == []


def test_tensors_keep_their_device_through_operations_and_autograd(accelerator: RecordingAccelerator) -> None:
    on_accelerator, on_host = torch.ones(4, device=ACCELERATOR), torch.ones(4)
    assert (on_accelerator.device, on_host.device) == (ACCELERATOR, torch.device("cpu"))
    assert on_accelerator.to(ACCELERATOR) is on_accelerator
    assert (
        on_accelerator[1:].device
        == (on_accelerator + on_host.sum()).device
        == torch.empty_like(on_accelerator).device
        == ACCELERATOR
    )
    assert on_accelerator.to(torch.bfloat16).device == on_host.to(on_accelerator).device == ACCELERATOR
    assert on_accelerator.cpu().device == torch.device("cpu")
    assert torch.tensor([1.0], device=ACCELERATOR).device == ACCELERATOR
    (gradient,) = torch.autograd.grad((on_accelerator.requires_grad_() * 2).bfloat16().sum(), on_accelerator)
    assert gradient.device == ACCELERATOR


def test_host_memory_in_a_kernel_is_a_finding_unless_it_is_a_scalar(
    accelerator: RecordingAccelerator, recorder: Recorder
) -> None:
    torch.ones(4, device=ACCELERATOR) + torch.ones(())
    assert rules(recorder) == []
    torch.ones(4, device=ACCELERATOR) + torch.ones(4)
    assert rules(recorder) == [ILLEGAL]


# Threads: a wait for the device does not wait for them


def on_another_thread(recorder: Recorder, task: Callable[[], object]) -> None:
    def recorded_task() -> None:
        with OperationRecorder(recorder):
            task()

    thread = threading.Thread(target=recorded_task, name="other")
    thread.start()
    thread.join()


def test_waiting_for_the_device_does_not_wait_for_a_thread(
    accelerator: RecordingAccelerator, recorder: Recorder
) -> None:
    tensor = torch.zeros(4)
    recorder.order_after("host other", recorder.snapshot(recorder.host))
    on_another_thread(recorder, lambda: tensor.fill_(1))
    accelerator.synchronize()
    tensor.fill_(2)
    assert rules(recorder) == [UNORDERED]


def test_an_event_covers_the_operations_of_the_host_before_its_record(
    accelerator: RecordingAccelerator, recorder: Recorder
) -> None:
    tensor = torch.zeros(4)
    event = accelerator.Event()
    assert not event.query(), "a caller that only polls must be correct with False"
    event.record()

    def wait_and_read() -> None:
        event.synchronize()
        tensor + 1

    on_another_thread(recorder, wait_and_read)
    assert rules(recorder) == []


# Accesses that are remembered per storage


def test_a_write_is_remembered_after_a_later_read(accelerator: RecordingAccelerator, recorder: Recorder) -> None:
    first, second, third = accelerator.Stream(), accelerator.Stream(), accelerator.Stream()
    tensor = torch.empty(4, device=ACCELERATOR)
    accelerator.synchronize()
    with accelerator.stream(first):
        tensor.fill_(1)
    second.wait_stream(first)
    for stream in (second, third):
        with accelerator.stream(stream):
            tensor.sum()
    (finding,) = recorder.findings
    assert finding.sides[0].startswith("write on stream 1")
    assert finding.sides[1].startswith("read on stream 3")


def test_a_read_is_remembered_after_a_later_read_that_is_not_ordered_after_it(
    accelerator: RecordingAccelerator, recorder: Recorder
) -> None:
    first, second = accelerator.Stream(), accelerator.Stream()
    tensor = torch.zeros(4, device=ACCELERATOR)
    accelerator.synchronize()
    for stream in (first, second):
        with accelerator.stream(stream):
            tensor.sum()
    with accelerator.stream(second):
        tensor.fill_(1)
    (finding,) = recorder.findings
    assert finding.sides[0].startswith("read on stream 1")


# Collectives


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_collective_is_complete_when_the_current_stream_has_waited_for_it(
    waits: bool, asynchronous: bool, accelerator: RecordingAccelerator, recorder: Recorder
) -> None:
    gather = recorded_collective(recorder, "all_gather_into_tensor", lambda *_, **__: mock.Mock())
    output, source = torch.empty(4, device=ACCELERATOR), torch.ones(2, device=ACCELERATOR)
    handle = gather(output, source, async_op=asynchronous)
    if waits and asynchronous:
        handle.wait()
    source.fill_(2)
    output + 1
    assert rules(recorder) == ([] if waits or not asynchronous else [UNORDERED] * 2)


@pytest.mark.parametrize("waiter", ["owner", "other", "none"])
def test_a_collective_keeps_its_tensors_alive_only_until_it_is_waited_for(
    waiter: str, accelerator: RecordingAccelerator, recorder: Recorder
) -> None:
    gather = recorded_collective(recorder, "all_gather_into_tensor", lambda *_, **__: mock.Mock())
    output, source = torch.empty(4, device=ACCELERATOR), torch.ones(2, device=ACCELERATOR)
    handle = gather(output, source, async_op=True)
    if waiter != "none":
        with accelerator.stream(accelerator.default_stream() if waiter == "owner" else accelerator.Stream()):
            handle.wait()
    del output, source
    assert rules(recorder) == ([FREED] * 2 if waiter == "other" else [])


# Memory


@pytest.mark.parametrize("how", ["nothing", "recorded", "waited", "host waited"])
def test_memory_freed_while_another_stream_uses_it_must_be_recorded_on_that_stream(
    how: str, accelerator: RecordingAccelerator, recorder: Recorder
) -> None:
    side = accelerator.Stream()
    tensor = torch.ones(4, device=ACCELERATOR)
    side.wait_stream(accelerator.current_stream())
    with accelerator.stream(side):
        tensor[1:].sum()
    if how == "recorded":
        tensor.record_stream(side)
    elif how == "waited":
        accelerator.current_stream().wait_stream(side)
    elif how == "host waited":
        side.synchronize()
    del tensor
    assert rules(recorder) == ([FREED] if how == "nothing" else [])


@pytest.mark.parametrize("waits", [True, False])
def test_memory_recorded_on_a_stream_may_be_freed_if_that_stream_waits_for_its_users(
    waits: bool, accelerator: RecordingAccelerator, recorder: Recorder
) -> None:
    caller, side = accelerator.Stream(), accelerator.Stream()
    tensor = torch.ones(4, device=ACCELERATOR)
    side.wait_stream(accelerator.current_stream())
    with accelerator.stream(side):
        tensor[1:].sum()
    if waits:
        caller.wait_stream(side)
    tensor.record_stream(caller)
    del tensor
    assert rules(recorder) == ([] if waits else [FREED])


# Our device, unchanged


@pytest.mark.parametrize("recorded_on", ["copying stream", "another stream"])
def test_our_device_records_an_event_on_its_current_stream(
    recorded_on: str, accelerator: RecordingAccelerator, recorder: Recorder
) -> None:
    with mock.patch.object(cuda, "torch", torch_for_our_device(accelerator, DeviceViews(recorder))):
        device = cuda.CudaDevice(0)
        pinned, source = device.empty_host(4, torch.float32), device.empty(4, torch.float32).fill_(1)
        copying, filled, event = device.stream(), device.event(), device.event()
        device.current_stream().record(filled)
        copying.wait(filled)
        with copying.issue():
            device.copy(pinned, source)
            if recorded_on == "copying stream":
                device.current_stream().record(event)
        if recorded_on == "another stream":
            device.current_stream().record(event)
        event.synchronize()
        pinned + 1
    assert rules(recorder) == ([] if recorded_on == "copying stream" else [UNORDERED])


def test_pageable_memory_that_is_freed_during_a_copy_is_a_finding(
    accelerator: RecordingAccelerator, recorder: Recorder
) -> None:
    destination = torch.zeros(4)
    destination.copy_(torch.ones(4, device=ACCELERATOR), non_blocking=True)
    del destination
    assert rules(recorder) == [FREED]
