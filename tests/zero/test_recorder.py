"""The recording itself, on programs whose order is known."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from tests.zero.recording.accelerator import RecordingAccelerator
from tests.zero.recording.operations import Accesses
from tests.zero.recording.places import Places
from tests.zero.recording.recorder import FREED, ILLEGAL, UNORDERED, Recorder

ACCELERATOR = torch.device("cpu", 0)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def accelerator(recorder: Recorder) -> Iterator[RecordingAccelerator]:
    places = Places(recorder)
    with places.told_apart(), Accesses(recorder):
        yield RecordingAccelerator(recorder, places)


def rules(recorder: Recorder) -> list[str]:
    recorder.collect()
    return [finding.rule for finding in recorder.findings]


# Order


@pytest.mark.parametrize("how", ["nothing", "wait_stream", "event", "synchronize", "device", "the other way"])
def test_streams_are_ordered_by_waits_only(how: str, accelerator: RecordingAccelerator, recorder: Recorder) -> None:
    first, second = accelerator.Stream(), accelerator.Stream()
    tensor = torch.empty(4, device=ACCELERATOR)
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
    elif how == "the other way":
        first.wait_stream(second)
    with accelerator.stream(second):
        tensor + 1
    first.synchronize()
    second.synchronize()
    assert rules(recorder) == ([UNORDERED] if how in ("nothing", "the other way") else [])


def test_an_event_orders_what_came_before_its_record(accelerator: RecordingAccelerator, recorder: Recorder) -> None:
    first, second = accelerator.Stream(), accelerator.Stream()
    tensor = torch.empty(4, device=ACCELERATOR)
    event = accelerator.Event()
    event.wait(second)
    with accelerator.stream(first):
        event.record()
        tensor.fill_(1)
    second.wait_event(event)
    with accelerator.stream(second):
        tensor.fill_(2)
    assert UNORDERED in rules(recorder)


def test_reads_do_not_conflict_and_neither_do_other_bytes(
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


def test_a_write_after_a_read_of_another_stream_is_a_conflict(
    accelerator: RecordingAccelerator, recorder: Recorder
) -> None:
    tensor = torch.zeros(4, device=ACCELERATOR)
    accelerator.synchronize()
    with accelerator.stream(accelerator.Stream()):
        tensor.sum()
    tensor.fill_(1)
    (finding,) = recorder.findings
    assert finding.rule == UNORDERED
    assert "read on stream 1" in finding.what
    assert "write on default stream" in finding.what


def test_threads_are_ordered_by_what_they_are_told(accelerator: RecordingAccelerator, recorder: Recorder) -> None:
    tensor = torch.zeros(4)

    def write() -> None:
        with Accesses(recorder):
            tensor.fill_(1)

    thread = threading.Thread(target=write, name="other")
    thread.start()
    thread.join()
    assert rules(recorder) == [UNORDERED]
    recorder.learns(recorder.host, recorder.now("host other"))
    tensor.fill_(2)
    assert rules(recorder) == [UNORDERED]


# Copies


@pytest.mark.parametrize(
    ("pinned", "non_blocking", "safe"), [(True, True, False), (True, False, True), (False, True, True)]
)
def test_a_copy_to_the_host_blocks_unless_pinned_and_asked_not_to(
    pinned: bool, non_blocking: bool, safe: bool, accelerator: RecordingAccelerator, recorder: Recorder
) -> None:
    source, destination = torch.ones(4, device=ACCELERATOR), torch.zeros(4)
    if pinned:
        destination = accelerator.pin_memory(destination)
    destination.copy_(source, non_blocking=non_blocking)
    destination + 1
    assert (rules(recorder) == []) is safe


@pytest.mark.parametrize(("pinned", "safe"), [(True, False), (False, True)])
def test_a_copy_from_pageable_memory_has_read_its_source_when_it_returns(
    pinned: bool, safe: bool, accelerator: RecordingAccelerator, recorder: Recorder
) -> None:
    source = accelerator.pin_memory(torch.ones(4)) if pinned else torch.ones(4)
    source.to(ACCELERATOR, non_blocking=True)
    source.fill_(2)
    assert (rules(recorder) == []) is safe


def test_what_is_copied_to_the_host_without_blocking_is_not_there_yet(
    accelerator: RecordingAccelerator, recorder: Recorder
) -> None:
    copied = torch.ones(4, device=ACCELERATOR).to("cpu", non_blocking=True)
    copied + 1
    assert rules(recorder) == [UNORDERED]


def test_asking_for_a_number_waits_for_the_stream(accelerator: RecordingAccelerator, recorder: Recorder) -> None:
    pinned = accelerator.pin_memory(torch.zeros(1))
    tensor = torch.ones(1, device=ACCELERATOR)
    pinned.copy_(tensor, non_blocking=True)
    assert tensor.item() == 1
    assert pinned.item() == 1
    assert rules(recorder) == []


def test_places_are_told_apart_and_kept(accelerator: RecordingAccelerator) -> None:
    there, here = torch.ones(4, device=ACCELERATOR), torch.ones(4)
    assert (there.device, here.device) == (ACCELERATOR, torch.device("cpu"))
    assert there.to(ACCELERATOR) is there
    assert there[1:].device == (there + here.sum()).device == torch.empty_like(there).device == ACCELERATOR
    assert there.to(torch.bfloat16).device == here.to(there).device == ACCELERATOR
    assert there.cpu().device == torch.device("cpu")
    assert torch.tensor([1.0], device=ACCELERATOR).device == ACCELERATOR
    (gradient,) = torch.autograd.grad((there.requires_grad_() * 2).bfloat16().sum(), there)
    assert gradient.device == ACCELERATOR


def test_a_kernel_cannot_be_given_host_memory(accelerator: RecordingAccelerator, recorder: Recorder) -> None:
    torch.ones(4, device=ACCELERATOR) + torch.ones(())
    assert rules(recorder) == []
    torch.ones(4, device=ACCELERATOR) + torch.ones(4)
    assert rules(recorder) == [ILLEGAL]


# Memory


@pytest.mark.parametrize("how", ["nothing", "recorded", "waited", "host waited"])
def test_memory_freed_while_another_stream_uses_it_must_be_recorded(
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
