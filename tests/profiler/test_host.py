"""Test the probes of host memory, of Adam and of the matrix product: that they do the work that they time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from deep_opt_states.device.cpu import HostDevice
from deep_opt_states.device.interface import Device
from deep_opt_states.device.kernels.adam import FP32_STATES, AdamKernel
from deep_opt_states.profiler.probes import (
    SUB_GROUPS,
    HostStates,
    Probe,
    ProbeError,
    d2h,
    device_updates,
    h2d,
    host_memory,
    host_updates,
    host_updates_during_copies,
    matrix_products,
    stock_updates,
)
from deep_opt_states.profiler.profile import stock_cpu_adam, training_cpu_adam
from tests.profiler.virtual import TimedAdam, VirtualDevice
from tests.runtime.plain_adam import PlainAdam

NUMEL = SUB_GROUPS * 1000


def states(kernel: AdamKernel | None = None, device: Device[Any] | None = None) -> HostStates:
    return HostStates(device or HostDevice(), NUMEL, kernel or PlainAdam())


def updates_of(memory: HostStates) -> Probe:
    return host_updates(memory, "cpu_adam_params_per_s", FP32_STATES)


def products(rows: int, small_rows: int) -> Probe:
    return matrix_products(HostDevice(), {"matmul_flops_per_s": rows, "matmul_small_flops_per_s": small_rows})


PROBES: dict[str, Callable[[], Probe]] = {
    "host memory": lambda: host_memory(states().slab),
    "training's Adam": lambda: updates_of(states(training_cpu_adam(SUB_GROUPS, 2, ()))),
    "stock's Adam": lambda: stock_updates(stock_cpu_adam(SUB_GROUPS), states(), HostDevice()),
    "plain Adam": lambda: updates_of(states()),
    "Adam on a device": lambda: device_updates(HostDevice(), NUMEL, PlainAdam()),
    "matrix products": lambda: products(64, 16),
    "matrix products of one size": lambda: products(64, 64),
}


@pytest.mark.usefixtures("other_defaults")
@pytest.mark.parametrize("make", PROBES.values(), ids=PROBES)
@pytest.mark.parametrize("repetitions", [1, 150])
def test_host_probes_do_not_depend_on_the_default_dtype_and_device_of_the_training_script(
    make: Callable[[], Probe], repetitions: int
) -> None:
    repeat = make()
    for _ in range(repetitions):
        assert all(rate > 0 for rate in repeat().values())


@pytest.mark.parametrize("stock", [False, True])
def test_the_probe_of_adam_updates_every_element(stock: bool) -> None:
    kernel = stock_cpu_adam(SUB_GROUPS) if stock else training_cpu_adam(SUB_GROUPS, 2, ())
    memory = states(kernel)
    repeat = stock_updates(kernel, memory, HostDevice()) if stock else updates_of(memory)
    for _ in range(3):
        repeat()
    for tensors in memory.sub_groups:
        smallest, largest = (value.item() for value in tensors.master.aminmax())
        assert 0.9 < smallest <= largest < 1.0
        assert largest - smallest < 1e-4
        assert tensors.param is not None
        assert torch.equal(tensors.param, tensors.master.bfloat16())


def test_the_cpu_probe_updates_every_sub_group_in_order_without_clipping() -> None:
    kernel = PlainAdam()
    repeat = updates_of(states(kernel))
    for _ in range(3):
        repeat()
    assert [len(steps) for steps in kernel.begun] == [SUB_GROUPS] * 3
    assert [steps[0].step for steps in kernel.begun] == [1, 2, 3]
    assert [steps[0].grad_scale for steps in kernel.begun] == [1, 1, 1]


# Adam during transfers, on a virtual clock


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> VirtualDevice:
    """Return a device that takes 0.5 s for a copy in one direction and 1 s in the other."""
    device = VirtualDevice(copy_s=(0, 0.5, 1))
    monkeypatch.setattr(time, "perf_counter", lambda: device.now_s)
    return device


def updates_during_copies(device: Any, kernel: AdamKernel) -> Probe:
    directions = [h2d(device, 4096), d2h(device, 4096)]
    return host_updates_during_copies(device, states(kernel, device), directions)


def test_both_rates_count_only_the_time_in_which_updates_and_both_directions_overlap(device: VirtualDevice) -> None:
    repeat = updates_during_copies(device, TimedAdam(device, update_s=2))
    assert repeat() == {
        "cpu_adam_beside_transfers_params_per_s": 1000 / 2,
        "both_beside_cpu_adam_bytes_per_s": 4096 / 0.5 + 4096 / 1,
    }


def test_sub_groups_that_were_updated_after_the_copies_are_not_counted(device: VirtualDevice) -> None:
    repeat = updates_during_copies(device, TimedAdam(device, update_s=2))
    # The probe chose 50 copies. Those of one direction now end at 5 s, after the second update of eight.
    device.copy_s = (0, 0.1, 1)
    rates = repeat()
    assert rates["cpu_adam_beside_transfers_params_per_s"] == 1000 / 2
    assert rates["both_beside_cpu_adam_bytes_per_s"] == pytest.approx(4096 / 0.1 + 4096 / 1)


def test_no_rate_is_returned_without_overlap(device: VirtualDevice) -> None:
    repeat = updates_during_copies(device, TimedAdam(device, update_s=2))
    device.copy_s = (0, 0.01, 1)
    with pytest.raises(ProbeError, match="nothing overlapped"):
        repeat()


def test_a_device_whose_copies_block_the_host_overlaps_nothing() -> None:
    repeat = updates_during_copies(HostDevice(), PlainAdam())
    with pytest.raises(ProbeError, match="nothing overlapped"):
        repeat()


def test_the_random_numbers_of_training_do_not_change() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    products(16, 8)
    assert torch.equal(torch.rand(3), expected)


def test_memory_that_is_updated_in_place_stays_in_range() -> None:
    """Check that values become neither denormal, which is slow, nor infinite."""
    memory = states()
    repeat = host_memory(memory.slab)
    for expected in (-1, 1, -1):
        repeat()
        assert memory.slab.tensor(0, memory.slab.size_bytes // 4, torch.float32).unique().tolist() == [expected]
