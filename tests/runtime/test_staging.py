"""Check the staging of gradients on the fake device, in every order that streams and events permit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import permutations
from unittest import mock

import pytest
import torch

from deep_opt_states.device.cpu import HostDevice
from deep_opt_states.zero.step.staging import Staging
from perf_model.prediction.memory import NUM_STAGING_BUFFERS
from tests.fake_device.device import FakeDevice
from tests.fake_device.timing import Late, Seeded, Timing
from tests.runtime.test_executor import Allocations, CountingDevice

BUFFER_NUMEL = 7
TIMINGS: list[Timing] = [*map(Late, permutations(range(2))), *map(Seeded, range(40))]

RUNS = ((0, (3, 2)), (5, (20,)), (30, (1, 1, 9)), (41, (7,)), (48, (4,)), (60, (2, 30, 1)))
"""Gradients that are sent together: their offset in host memory, and the lengths of adjacent gradients."""

NUMEL = 100


def sent_down(device: FakeDevice) -> tuple[torch.Tensor, torch.Tensor, Staging]:
    """Return host memory after all gradients of ``RUNS`` were copied, its expected contents, and the staging.

    Each gradient's own memory is overwritten as soon as it is sent, as DeepSpeed does with its bucket.
    """
    staging = Staging(device, BUFFER_NUMEL, torch.float32)
    host = device.empty_host(NUMEL, torch.float32).fill_(-1)
    values = torch.arange(NUMEL, dtype=torch.float32) / 3
    expected = torch.full((NUMEL,), -1.0)
    bucket = device.empty(NUMEL, torch.float32)
    reduction = device.stream()
    other = device.empty_host(NUMEL, torch.float32).fill_(-2)
    for begin, numels in RUNS:
        offset = begin
        for numel in numels:
            reduced = device.empty_host(numel, torch.float32).copy_(values[offset : offset + numel])
            expected[offset : offset + numel] = values[offset : offset + numel]
            with reduction.issue():
                device.copy(bucket[:numel], reduced)
                staging.send(host, offset, bucket[:numel])
                device.copy(bucket, other)
            offset += numel
        with reduction.issue():
            staging.flush()
    staging.synchronize()
    return host, expected, staging


@pytest.mark.parametrize("timing", TIMINGS, ids=repr)
def test_gradients_reach_host_memory(timing: Timing) -> None:
    host, expected, staging = sent_down(FakeDevice(timing))
    assert torch.equal(host, expected)
    numel = sum(sum(numels) for _, numels in RUNS)
    assert staging.traffic.d2h_bytes == 4 * numel
    # Adjacent gradients are copied together, and gradients longer than a buffer are copied in pieces.
    pieces = sum(-(-sum(numels) // BUFFER_NUMEL) for _, numels in RUNS)
    assert len(RUNS) < staging.traffic.d2h_copies <= pieces


def test_stream_and_not_the_host_waits_for_a_buffer() -> None:
    device = FakeDevice(Late())
    staging = Staging(device, BUFFER_NUMEL, torch.float32)
    host = device.empty_host(NUMEL, torch.float32).fill_(-1)
    gradient = device.empty(NUMEL, torch.float32)
    staging.send(host, 0, gradient)
    staging.flush()
    assert host.tolist() == [-1] * NUMEL, "the host has not waited for anything"
    assert not device.lanes.idle()


class InFlight(FakeDevice):
    """A device that counts the copies to host memory that are in flight when a buffer is written to."""

    def __init__(self, timing: Timing) -> None:
        super().__init__(timing)
        self.most = 0
        self._issued = self._done = 0

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        down = any(allocation is self._allocation(destination) for allocation in self._pinned)
        super().copy(destination, source)
        if down:
            self._issued += 1
            self.launch(self._arrived)
        else:
            self.launch(self._written, self._issued)

    def _arrived(self) -> None:
        self._done += 1

    def _written(self, issued_before: int) -> None:
        self.most = max(self.most, issued_before - self._done)


@pytest.mark.parametrize("timing", TIMINGS, ids=repr)
def test_no_more_than_the_buffers_are_in_flight(timing: Timing) -> None:
    device = InFlight(timing)
    sent_down(device)
    assert device.most <= NUM_STAGING_BUFFERS


def test_without_the_wait_for_a_buffer_it_is_overwritten_in_flight() -> None:
    wrong, most = 0, 0
    for timing in TIMINGS:
        device = InFlight(timing)
        with mock.patch.object(Staging, "_wait_until_free"):
            host, expected, _ = sent_down(device)
        wrong += not torch.equal(host, expected)
        most = max(most, device.most)
    assert wrong > 0
    assert most > NUM_STAGING_BUFFERS


@contextmanager
def nothing_is_allocated(device: CountingDevice) -> Iterator[Allocations]:
    device.reserved.clear()
    with Allocations() as allocations:
        yield allocations
    assert device.reserved == []
    assert allocations.found == []
    assert allocations.seen > 0


def test_sending_and_adding_reserve_and_allocate_nothing() -> None:
    device = CountingDevice()
    staging = Staging(device, BUFFER_NUMEL, torch.bfloat16)
    assert device.reserved.count(f"empty {BUFFER_NUMEL}") == NUM_STAGING_BUFFERS
    assert sum(entry.startswith("empty") for entry in device.reserved) == NUM_STAGING_BUFFERS
    host, gradient = torch.zeros(NUMEL, dtype=torch.bfloat16), torch.ones(NUMEL, dtype=torch.bfloat16)
    with nothing_is_allocated(device):
        staging.send(host, 0, gradient[:50])
        staging.send(host, 50, gradient[50:])
        staging.flush()
        staging.wait_for_copies()
        staging.add_to(gradient, host)
    assert gradient.tolist() == [2] * NUMEL
    assert host.tolist() == [1] * NUMEL


def test_host_memory_is_added_while_a_buffer_is_being_filled() -> None:
    staging = Staging(HostDevice(), BUFFER_NUMEL, torch.float32)
    host, gradient = torch.zeros(NUMEL), torch.arange(NUMEL, dtype=torch.float32)
    staging.send(host, 0, gradient[:3])
    total = torch.ones(20)
    staging.add_to(total, torch.full((20,), 5.0))
    staging.send(host, 3, gradient[3:9])
    staging.flush()
    assert total.tolist() == [6] * 20
    assert torch.equal(host[:9], gradient[:9])


def test_close_waits_for_copies_in_flight() -> None:
    device = FakeDevice(Late())
    staging = Staging(device, BUFFER_NUMEL, torch.float32)
    host = device.empty_host(3, torch.float32).fill_(-1)
    gradient = device.empty(3, torch.float32)
    device.copy(gradient, device.empty_host(3, torch.float32).fill_(4))
    staging.send(host, 0, gradient)
    staging.flush()
    staging.close()
    assert host.tolist() == [4] * 3
    assert device.allocated_bytes == gradient.nbytes
