"""Test the copies: the rates, in exact numbers on a virtual clock, and that all bytes arrive."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from deep_opt_states.device.cpu import HostDevice
from deep_opt_states.device.interface import Device
from deep_opt_states.profiler.probes import Copies, Probe, bandwidth, d2h, h2d, latency
from tests.fake_device.device import FakeDevice
from tests.fake_device.timing import Late, Seeded
from tests.profiler.virtual import VirtualDevice

NBYTES = 4096

DIRECTIONS: dict[str, list[Callable[[Device[Any], int], Copies]]] = {
    "h2d": [h2d],
    "d2h": [d2h],
    "pageable h2d": [partial(h2d, pinned=False)],
    "pageable d2h": [partial(d2h, pinned=False)],
    "both": [h2d, d2h],
}


def make(device: Device[Any], name: str) -> tuple[Probe, list[Copies]]:
    copies = [create(device, NBYTES) for create in DIRECTIONS[name]]
    return bandwidth(device, copies, 3, "bytes_per_s"), copies


def require_copied(copies: list[Copies]) -> None:
    for each in copies:
        assert each._destination.tolist() == [1.0] * (NBYTES // 4)


@pytest.mark.parametrize("name", DIRECTIONS)
def test_all_bytes_arrive(name: str) -> None:
    repeat, copies = make(HostDevice(), name)
    assert {each._destination.sum().item() for each in copies} == {0.0}
    assert all(rate > 0 for rate in repeat().values())
    require_copied(copies)


@pytest.mark.usefixtures("other_defaults")
@pytest.mark.parametrize("name", DIRECTIONS)
def test_copies_do_not_depend_on_the_default_dtype_and_device_of_the_training_script(name: str) -> None:
    repeat, copies = make(HostDevice(), name)
    repeat()
    assert all(each._destination.dtype == torch.float32 for each in copies)
    require_copied(copies)


@pytest.mark.parametrize("timing", [Late(), Late([1, 0]), *map(Seeded, range(10))], ids=repr)
@pytest.mark.parametrize("name", DIRECTIONS)
def test_bytes_have_arrived_when_the_clock_is_read(name: str, timing: Late | Seeded) -> None:
    repeat, copies = make(FakeDevice(timing), name)
    for _ in range(2):
        repeat()
    require_copied(copies)


def test_one_way_divides_all_bytes_by_the_time_of_the_stream() -> None:
    device = VirtualDevice(copy_s=(0, 0.5))
    repeat = bandwidth(device, [h2d(device, NBYTES)], 4, "h2d_bytes_per_s")
    assert repeat() == repeat() == {"h2d_bytes_per_s": NBYTES / 0.5}


def test_both_ways_counts_only_the_time_in_which_both_directions_work() -> None:
    device = VirtualDevice(copy_s=(0, 1, 4))
    repeat = bandwidth(device, [h2d(device, NBYTES), d2h(device, NBYTES)], 6, "both_bytes_per_s")
    # The slower direction moves one buffer and a half in the 6 s of the faster one; afterwards it works alone.
    assert repeat() == {"both_bytes_per_s": NBYTES * (6 + 1.5) / 6}


def test_latency_is_a_time_per_copy() -> None:
    device = VirtualDevice(copy_s=(0, 0.25))
    assert latency(device, h2d(device, NBYTES), 8)() == {"copy_latency_s": 0.25}
