"""Test the copies: the rates, in exact numbers on a virtual clock, and that all bytes arrive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from deep_opt_states.device.cpu import HostDevice
from deep_opt_states.device.interface import Device
from deep_opt_states.profiler.method import Probe
from deep_opt_states.profiler.ranks import ProbeError
from deep_opt_states.profiler.transfers import (
    BothWays,
    Latency,
    OneWay,
    pageable_d2h,
    pageable_h2d,
    pinned_both,
    pinned_d2h,
    pinned_h2d,
)
from tests.fake_device.device import FakeDevice
from tests.fake_device.timing import Late, Seeded
from tests.profiler.virtual import VirtualDevice

NBYTES = 4096

PROBES: dict[str, Callable[[Device[Any]], Probe]] = {
    "h2d": lambda device: OneWay(device, pinned_h2d(device, NBYTES), 2, "h2d_bytes_per_s"),
    "d2h": lambda device: OneWay(device, pinned_d2h(device, NBYTES), 2, "d2h_bytes_per_s"),
    "pageable h2d": lambda device: OneWay(device, pageable_h2d(device, NBYTES), 2, "pageable_h2d_bytes_per_s"),
    "pageable d2h": lambda device: OneWay(device, pageable_d2h(device, NBYTES), 2, "pageable_d2h_bytes_per_s"),
    "both": lambda device: BothWays(device, *pinned_both(device, NBYTES), 3),
    "latency": lambda device: Latency(device, pinned_h2d(device, NBYTES), 4, "copy_latency_s"),
}


@pytest.mark.parametrize("make", PROBES.values(), ids=PROBES)
def test_all_bytes_arrive(make: Callable[[Device[Any]], Probe]) -> None:
    probe = make(HostDevice())
    assert all(rate > 0 for rate in probe.repeat().values())
    probe.verify()


@pytest.mark.usefixtures("other_defaults")
@pytest.mark.parametrize("make", PROBES.values(), ids=PROBES)
def test_transfer_probes_do_not_depend_on_the_default_dtype_and_device_of_the_training_script(
    make: Callable[[Device[Any]], Probe],
) -> None:
    probe = make(HostDevice())
    probe.repeat()
    probe.verify()


@pytest.mark.parametrize("timing", [Late(), Late([1, 0]), *map(Seeded, range(10))], ids=repr)
@pytest.mark.parametrize("make", PROBES.values(), ids=PROBES)
def test_bytes_have_arrived_when_the_clock_is_read(make: Callable[[Device[Any]], Probe], timing: Late | Seeded) -> None:
    probe = make(FakeDevice(timing))
    for _ in range(2):
        probe.repeat()
    probe.verify()


@pytest.mark.parametrize("make", PROBES.values(), ids=PROBES)
def test_the_destination_is_wrong_before_the_first_copy(make: Callable[[Device[Any]], Probe]) -> None:
    with pytest.raises(ProbeError, match="1024 of 1024 elements are wrong"):
        make(HostDevice()).verify()


@pytest.mark.parametrize("make", PROBES.values(), ids=PROBES)
def test_a_device_that_corrupts_one_element_is_detected(make: Callable[[Device[Any]], Probe]) -> None:
    class Corrupting(HostDevice):
        def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
            destination.copy_(source)
            destination[5] += 1

    probe = make(Corrupting())
    probe.repeat()
    with pytest.raises(ProbeError, match=r"1 of 1024 elements are wrong, the first of them at index 5"):
        probe.verify()


def test_one_way_divides_all_bytes_by_the_time_of_the_stream() -> None:
    device = VirtualDevice(copy_s=(0, 0.5))
    probe = OneWay(device, pinned_h2d(device, NBYTES), 4, "h2d_bytes_per_s")
    assert probe.repeat() == probe.repeat() == {"h2d_bytes_per_s": NBYTES / 0.5}


def test_both_ways_counts_only_the_time_in_which_both_directions_work() -> None:
    device = VirtualDevice(copy_s=(0, 1, 4))
    probe = BothWays(device, *pinned_both(device, NBYTES), 6)
    # The slower direction moves one buffer and a half in the 6 s of the faster one; afterwards it works alone.
    assert probe.repeat() == {"both_bytes_per_s": NBYTES * (6 + 1.5) / 6}


def test_latency_is_a_time_per_copy() -> None:
    device = VirtualDevice(copy_s=(0, 0.25))
    assert Latency(device, pinned_h2d(device, NBYTES), 8, "copy_latency_s").repeat() == {"copy_latency_s": 0.25}
