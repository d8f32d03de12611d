"""Probes of host memory, of Adam and of the matrix product: what they do, and that a wrong result is found."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from deep_opt_states.device.cpu import HostDevice
from deep_opt_states.device.interface import Device
from deep_opt_states.device.kernels.adam import AdamKernel, AdamTensors, Part
from deep_opt_states.profiler.adam_kernels import stock_cpu_adam, training_cpu_adam
from deep_opt_states.profiler.adam_throughput import (
    DeviceUpdates,
    HostUpdates,
    HostUpdatesBesideTransfers,
)
from deep_opt_states.profiler.host_bandwidth import Copied, CopyLatency, Rounded, UpdateInPlace
from deep_opt_states.profiler.host_states import SUB_GROUPS, HostStates
from deep_opt_states.profiler.matrix import MatrixProduct
from deep_opt_states.profiler.method import Probe
from deep_opt_states.profiler.ranks import ProbeError
from deep_opt_states.profiler.transfers import pinned_both
from tests.profiler.virtual import TimedAdam, VirtualDevice
from tests.runtime.adam import PlainAdam

NUMEL = SUB_GROUPS * 1000


def states(kernel: AdamKernel | None = None, device: Device[Any] | None = None) -> HostStates:
    return HostStates(device or HostDevice(), NUMEL, kernel or PlainAdam())


def updates(kernel: AdamKernel, device: Device[Any] | None = None) -> HostUpdates:
    return HostUpdates.as_in_training(states(kernel, device))


PROBES: dict[str, Callable[[], Probe]] = {
    "update in place": lambda: UpdateInPlace(states().slab),
    "copied": lambda: Copied(states().slab),
    "rounded": lambda: Rounded(states().slab),
    "latency of a copy": lambda: CopyLatency(HostDevice(), states()),
    "training's Adam": lambda: updates(training_cpu_adam(SUB_GROUPS, 2, ())),
    "training's Adam by another number of threads": lambda: HostUpdates.by(
        training_cpu_adam(SUB_GROUPS, 1, ()), states()
    ),
    "stock's Adam": lambda: HostUpdates.by_stock(stock_cpu_adam(SUB_GROUPS), states(), HostDevice()),
    "plain Adam": lambda: updates(PlainAdam()),
    "Adam on a device": lambda: DeviceUpdates(HostDevice(), NUMEL, PlainAdam()),
    "matrix product": lambda: MatrixProduct(HostDevice(), 64),
}


@pytest.mark.parametrize("make", PROBES.values(), ids=PROBES)
@pytest.mark.parametrize("repetitions", [1, 2, 150])
def test_results_are_verified(make: Callable[[], Probe], repetitions: int) -> None:
    probe = make()
    for _ in range(repetitions):
        (rate,) = probe.repeat().values()
        assert rate > 0
    probe.verify()


@pytest.mark.usefixtures("other_defaults")
@pytest.mark.parametrize("make", PROBES.values(), ids=PROBES)
def test_the_script_that_trains_has_defaults_of_its_own(make: Callable[[], Probe]) -> None:
    probe = make()
    probe.repeat()
    probe.verify()


def spoiled(probe: Probe, attribute: str) -> Probe:
    probe.repeat()
    getattr(probe, attribute)[0] += 1
    return probe


class Idle(PlainAdam):
    def update(self, *arguments: Any) -> None:
        pass


class OneElementLess(PlainAdam):
    def update(self, sub_group: int, tensors: AdamTensors, part: Part | None = None) -> None:
        super().update(sub_group, replace(tensors, **{name: its[:-1] for name, its in vars(tensors).items()}), part)


def updated(kernel: AdamKernel) -> Probe:
    probe = updates(kernel)
    probe.repeat()
    return probe


def with_one_not_rounded() -> Probe:
    probe = updates(PlainAdam())
    probe.repeat()
    probe._updates.states[2].param[7] = 5
    return probe


WRONG: dict[str, tuple[Callable[[], Probe], str]] = {
    "product in place": (lambda: spoiled(UpdateInPlace(states().slab), "_memory"), "products"),
    "copied": (lambda: spoiled(Copied(states().slab), "_destination"), "copied elements"),
    "one of many copies": (
        lambda: spoiled(CopyLatency(HostDevice(), states()), "_destination"),
        "copied elements",
    ),
    "rounded": (lambda: spoiled(Rounded(states().slab), "_destination"), "rounded elements"),
    "matrix": (lambda: spoiled(MatrixProduct(HostDevice(), 64), "_product"), "matrix product"),
    "no update": (lambda: updated(Idle()), "sub-group 0 is not updated alike"),
    "one element not updated": (lambda: updated(OneElementLess()), "sub-group 0 is not updated alike"),
    "one element not rounded": (with_one_not_rounded, "sub-group 2 is not rounded"),
}


@pytest.mark.parametrize(("make", "reason"), WRONG.values(), ids=WRONG)
def test_a_wrong_result_is_found(make: Callable[[], Probe], reason: str) -> None:
    with pytest.raises(ProbeError, match=reason):
        make().verify()


def test_a_cpu_update_is_what_training_does() -> None:
    """Of every sub-group, in order, with a gradient scale."""
    kernel = PlainAdam()
    probe = updates(kernel)
    for _ in range(3):
        probe.repeat()
    assert [len(steps) for steps in kernel.begun] == [SUB_GROUPS] * 3
    assert [steps[0].step for steps in kernel.begun] == [1, 2, 3]
    assert [steps[0].grad_scale for steps in kernel.begun] == [2, 0.5, 2]


# Adam beside transfers, on a clock of the test's own


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> VirtualDevice:
    """Copies in 0.5 s one way and 1 s the other."""
    device = VirtualDevice(copy_s=(0, 0.5, 1))
    monkeypatch.setattr(time, "perf_counter", lambda: device.now_s)
    return device


def beside(device: VirtualDevice, update_s: float) -> HostUpdatesBesideTransfers:
    alone = updates(TimedAdam(device, update_s), device)
    return HostUpdatesBesideTransfers(device, alone, *pinned_both(device, 4096))


def test_both_rates_are_of_the_time_in_which_all_three_work(device: VirtualDevice) -> None:
    probe = beside(device, update_s=2)
    assert probe.repeat() == {
        "cpu_adam_beside_transfers_params_per_s": 1000 / 2,
        "both_beside_cpu_adam_bytes_per_s": 4096 / 0.5 + 4096 / 1,
    }
    probe.verify()


def test_sub_groups_that_were_updated_after_the_copies_are_not_counted(device: VirtualDevice) -> None:
    probe = beside(device, update_s=2)
    # 50 copies were found to be enough. Now those of one direction end at 5 s: after the second update of eight.
    assert probe._count == 50
    device.copy_s = (0, 0.1, 1)
    rates = probe.repeat()
    assert rates["cpu_adam_beside_transfers_params_per_s"] == 1000 / 2
    assert rates["both_beside_cpu_adam_bytes_per_s"] == pytest.approx(4096 / 0.1 + 4096 / 1)


def test_without_overlap_there_is_no_rate(device: VirtualDevice) -> None:
    probe = beside(device, update_s=2)
    device.copy_s = (0, 0.01, 1)
    with pytest.raises(ProbeError, match="nothing overlapped"):
        probe.repeat()


def test_a_device_that_makes_the_host_wait_overlaps_nothing() -> None:
    device = HostDevice()
    probe = HostUpdatesBesideTransfers(device, updates(PlainAdam(), device), *pinned_both(device, 4096))
    with pytest.raises(ProbeError, match="nothing overlapped"):
        probe.repeat()


def test_random_numbers_of_training_are_left_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    MatrixProduct(HostDevice(), 16)
    assert torch.equal(torch.rand(3), expected)


def test_memory_that_is_updated_in_place_stays_in_range() -> None:
    """Denormals are slow, and infinities prove nothing."""
    probe = UpdateInPlace(states().slab)
    seen = []
    for _ in range(4):
        probe.repeat()
        seen.append(probe._memory.unique().tolist())
    assert seen == [[2], [1], [2], [1]]
