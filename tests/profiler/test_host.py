"""Test the probes of host memory, of Adam and of the matrix product: their work, and that they detect wrong results."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from deep_opt_states.device.cpu import HostDevice
from deep_opt_states.device.interface import Device
from deep_opt_states.device.kernels.adam import AdamKernel, AdamTensors, ElementRange
from deep_opt_states.profiler.adam_kernels import stock_cpu_adam, training_cpu_adam
from deep_opt_states.profiler.adam_throughput import (
    DeviceUpdates,
    HostUpdates,
    HostUpdatesDuringTransfers,
)
from deep_opt_states.profiler.host_bandwidth import HostCopy, HostCopyLatency, UpdateInPlace
from deep_opt_states.profiler.host_states import SUB_GROUPS, HostStates
from deep_opt_states.profiler.matrix import MatrixProducts
from deep_opt_states.profiler.method import Probe
from deep_opt_states.profiler.ranks import ProbeError
from deep_opt_states.profiler.transfers import pinned_both
from tests.profiler.virtual import TimedAdam, VirtualDevice
from tests.runtime.plain_adam import PlainAdam

NUMEL = SUB_GROUPS * 1000


def states(kernel: AdamKernel | None = None, device: Device[Any] | None = None) -> HostStates:
    return HostStates(device or HostDevice(), NUMEL, kernel or PlainAdam())


def updates(kernel: AdamKernel, device: Device[Any] | None = None) -> HostUpdates:
    return HostUpdates.with_training_threads(states(kernel, device))


PROBES: dict[str, Callable[[], Probe]] = {
    "update in place": lambda: UpdateInPlace(states().slab),
    "copy": lambda: HostCopy(states().slab),
    "latency of a copy": lambda: HostCopyLatency(HostDevice(), states()),
    "training's Adam": lambda: updates(training_cpu_adam(SUB_GROUPS, 2, ())),
    "training's Adam with another number of threads": lambda: HostUpdates.with_own_threads(
        training_cpu_adam(SUB_GROUPS, 1, ()), states()
    ),
    "stock's Adam": lambda: HostUpdates.with_stock_kernel(stock_cpu_adam(SUB_GROUPS), states(), HostDevice()),
    "plain Adam": lambda: updates(PlainAdam()),
    "Adam on a device": lambda: DeviceUpdates(HostDevice(), NUMEL, PlainAdam()),
    "matrix products": lambda: MatrixProducts(HostDevice(), 64, 16),
    "matrix products of one size": lambda: MatrixProducts(HostDevice(), 64, 64),
}


@pytest.mark.parametrize("make", PROBES.values(), ids=PROBES)
@pytest.mark.parametrize("repetitions", [1, 2, 150])
def test_correct_results_pass_the_verification(make: Callable[[], Probe], repetitions: int) -> None:
    probe = make()
    for _ in range(repetitions):
        assert all(rate > 0 for rate in probe.repeat().values())
    probe.verify()


@pytest.mark.usefixtures("other_defaults")
@pytest.mark.parametrize("make", PROBES.values(), ids=PROBES)
def test_host_probes_do_not_depend_on_the_default_dtype_and_device_of_the_training_script(
    make: Callable[[], Probe],
) -> None:
    probe = make()
    probe.repeat()
    probe.verify()


def spoiled(probe: Probe, attribute: str) -> Probe:
    probe.repeat()
    getattr(probe, attribute)[0] += 1
    return probe


class Idle(PlainAdam):
    """A kernel that does nothing."""

    def update(self, *arguments: Any) -> None:
        pass


class OneElementLess(PlainAdam):
    """A kernel that leaves out the last element."""

    def update(self, sub_group: int, tensors: AdamTensors, element_range: ElementRange | None = None) -> None:
        shorter = {name: tensor[:-1] for name, tensor in vars(tensors).items()}
        super().update(sub_group, replace(tensors, **shorter), element_range)


def updated(kernel: AdamKernel) -> Probe:
    probe = updates(kernel)
    probe.repeat()
    return probe


def with_one_not_rounded() -> Probe:
    probe = updates(PlainAdam())
    probe.repeat()
    probe._updates.states[2].param[7] = 5
    return probe


def with_wrong_product(rows: int) -> Probe:
    probe = MatrixProducts(HostDevice(), 64, 16)
    probe.repeat()
    *_, product = probe._matrices[rows]
    product[0] += 1
    return probe


WRONG: dict[str, tuple[Callable[[], Probe], str]] = {
    "product in place": (lambda: spoiled(UpdateInPlace(states().slab), "_memory"), "products"),
    "copy": (lambda: spoiled(HostCopy(states().slab), "_destination"), "copied elements"),
    "one of many copies": (
        lambda: spoiled(HostCopyLatency(HostDevice(), states()), "_destination"),
        "copied elements",
    ),
    "matrix": (lambda: with_wrong_product(64), "matrix product"),
    "small matrix": (lambda: with_wrong_product(16), "matrix product"),
    "no update": (lambda: updated(Idle()), "the elements of sub-group 0 are not updated equally"),
    "one element not updated": (
        lambda: updated(OneElementLess()),
        "the elements of sub-group 0 are not updated equally",
    ),
    "one element not rounded": (with_one_not_rounded, "the parameters of sub-group 2 are not its masters rounded"),
}


@pytest.mark.parametrize(("make", "reason"), WRONG.values(), ids=WRONG)
def test_a_wrong_result_is_detected(make: Callable[[], Probe], reason: str) -> None:
    with pytest.raises(ProbeError, match=reason):
        make().verify()


def test_the_cpu_probe_updates_every_sub_group_in_order_with_a_gradient_scale() -> None:
    kernel = PlainAdam()
    probe = updates(kernel)
    for _ in range(3):
        probe.repeat()
    assert [len(steps) for steps in kernel.begun] == [SUB_GROUPS] * 3
    assert [steps[0].step for steps in kernel.begun] == [1, 2, 3]
    assert [steps[0].grad_scale for steps in kernel.begun] == [2, 0.5, 2]


# Adam during transfers, on a virtual clock


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> VirtualDevice:
    """Return a device that takes 0.5 s for a copy in one direction and 1 s in the other."""
    device = VirtualDevice(copy_s=(0, 0.5, 1))
    monkeypatch.setattr(time, "perf_counter", lambda: device.now_s)
    return device


def updates_during_transfers(device: VirtualDevice, update_s: float) -> HostUpdatesDuringTransfers:
    alone = updates(TimedAdam(device, update_s), device)
    return HostUpdatesDuringTransfers(device, alone, *pinned_both(device, 4096))


def test_both_rates_count_only_the_time_in_which_updates_and_both_directions_overlap(device: VirtualDevice) -> None:
    probe = updates_during_transfers(device, update_s=2)
    assert probe.repeat() == {
        "cpu_adam_beside_transfers_params_per_s": 1000 / 2,
        "both_beside_cpu_adam_bytes_per_s": 4096 / 0.5 + 4096 / 1,
    }
    probe.verify()


def test_sub_groups_that_were_updated_after_the_copies_are_not_counted(device: VirtualDevice) -> None:
    probe = updates_during_transfers(device, update_s=2)
    # The probe chose 50 copies. Those of one direction now end at 5 s, after the second update of eight.
    assert probe._count == 50
    device.copy_s = (0, 0.1, 1)
    rates = probe.repeat()
    assert rates["cpu_adam_beside_transfers_params_per_s"] == 1000 / 2
    assert rates["both_beside_cpu_adam_bytes_per_s"] == pytest.approx(4096 / 0.1 + 4096 / 1)


def test_no_rate_is_returned_without_overlap(device: VirtualDevice) -> None:
    probe = updates_during_transfers(device, update_s=2)
    device.copy_s = (0, 0.01, 1)
    with pytest.raises(ProbeError, match="nothing overlapped"):
        probe.repeat()


def test_a_device_whose_copies_block_the_host_overlaps_nothing() -> None:
    device = HostDevice()
    probe = HostUpdatesDuringTransfers(device, updates(PlainAdam(), device), *pinned_both(device, 4096))
    with pytest.raises(ProbeError, match="nothing overlapped"):
        probe.repeat()


def test_the_random_numbers_of_training_do_not_change() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    MatrixProducts(HostDevice(), 16, 8)
    assert torch.equal(torch.rand(3), expected)


def test_memory_that_is_updated_in_place_stays_in_range() -> None:
    """Check that values become neither denormal, which is slow, nor infinite, which verifies nothing."""
    probe = UpdateInPlace(states().slab)
    seen = []
    for _ in range(4):
        probe.repeat()
        seen.append(probe._memory.unique().tolist())
    assert seen == [[2], [1], [2], [1]]
