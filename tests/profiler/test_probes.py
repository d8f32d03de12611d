"""Test the probes: they do the work that they time, on all ranks, in memory as in training, and free all of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any
from unittest import mock

import pytest
import torch

from deep_opt_states.device.cpu import HostDevice
from deep_opt_states.device.cuda import CudaDevice
from deep_opt_states.device.interface import Device
from deep_opt_states.device.kernels.adam import FP32_STATES, AdamKernel
from deep_opt_states.profiler import probes
from deep_opt_states.profiler.profile import sample, stock_cpu_adam, training_cpu_adam
from tests.profiler.virtual import SMALL, TimedAdam, VirtualDevice
from tests.runtime.plain_adam import PlainAdam

LAUNCH_S, KERNEL_S = 6e-5, 1e-5


def states(kernel: AdamKernel | None = None, device: Device[Any] | None = None) -> probes.HostStates:
    return probes.HostStates(device or HostDevice(), probes.SUB_GROUPS * 1000, kernel or PlainAdam())


def updates_of(memory: probes.HostStates) -> probes.Probe:
    return probes.host_updates(memory, "cpu_adam_params_per_s", FP32_STATES)


PROBES: dict[str, Callable[[], probes.Probe]] = {
    "host memory": lambda: probes.host_memory(states().slab),
    "training's Adam": lambda: updates_of(states(training_cpu_adam(probes.SUB_GROUPS, 2, ()))),
    "stock's Adam": lambda: probes.stock_updates(stock_cpu_adam(probes.SUB_GROUPS), states(), HostDevice()),
    "Adam on a device": lambda: probes.device_updates(HostDevice(), 8000, PlainAdam()),
    "matrix products": lambda: probes.matrix_products(HostDevice(), 64),
    "copies": lambda: probes.bandwidth(HostDevice(), [probes.h2d(HostDevice(), 4096)], 3, "bytes_per_s"),
}


@pytest.mark.usefixtures("other_defaults")
@pytest.mark.parametrize("make", PROBES.values(), ids=PROBES)
def test_probes_stay_in_range_whatever_the_default_dtype_and_device_of_the_training_script(
    make: Callable[[], probes.Probe],
) -> None:
    repeat = make()
    for _ in range(10):
        assert all(rate > 0 for rate in repeat().values())


@pytest.mark.parametrize("stock", [False, True])
def test_the_probe_of_adam_updates_every_element(stock: bool) -> None:
    kernel = stock_cpu_adam(probes.SUB_GROUPS) if stock else training_cpu_adam(probes.SUB_GROUPS, 2, ())
    memory = states(kernel)
    repeat = probes.stock_updates(kernel, memory, HostDevice()) if stock else updates_of(memory)
    for _ in range(3):
        repeat()
    for tensors in memory.sub_groups:
        smallest, largest = (value.item() for value in tensors.master.aminmax())
        assert 0.9 < smallest <= largest < 1.0
        assert largest - smallest < 1e-4
        assert tensors.param is not None
        assert torch.equal(tensors.param, tensors.master.bfloat16())


def test_rates_alongside_transfers_count_only_the_time_of_overlap() -> None:
    # A copy in one direction takes 0.5 s, in the other 1 s, and an update 2 s.
    device = VirtualDevice(copy_s=(0, 0.5, 1))

    def updates_during_copies(device: Any, kernel: AdamKernel) -> probes.Probe:
        directions = [probes.h2d(device, 4096), probes.d2h(device, 4096)]
        return probes.host_updates_during_copies(device, states(kernel, device), directions)

    updates, copies = "cpu_adam_beside_transfers_params_per_s", "both_beside_cpu_adam_bytes_per_s"
    with mock.patch.object(time, "perf_counter", side_effect=lambda: device.now_s):
        repeat = updates_during_copies(device, TimedAdam(device, 2))
        assert repeat() == {updates: 1000 / 2, copies: 4096 / 0.5 + 4096 / 1}
        # The probe chose 50 copies. In one direction they now end at 5 s, after the second update of eight.
        device.copy_s = (0, 0.1, 1)
        assert repeat() == {updates: 1000 / 2, copies: pytest.approx(4096 / 0.1 + 4096 / 1)}
        device.copy_s = (0, 0.01, 1)
        with pytest.raises(probes.ProbeError, match="nothing overlapped"):
            repeat()
    repeat = updates_during_copies(HostDevice(), PlainAdam())
    with pytest.raises(probes.ProbeError, match="nothing overlapped"):
        repeat()


def updates(device: VirtualDevice, *, launch_s: float = LAUNCH_S, numel: int = 1000) -> probes.Probe:
    return probes.device_updates(device, numel, TimedAdam(device, launch_s, KERNEL_S))


def test_a_stream_that_became_idle_too_early_is_kept_busy_for_longer() -> None:
    device = VirtualDevice()
    repeat = updates(device, launch_s=10e-3)
    for _ in range(2):
        assert repeat() == {"gpu_adam_params_per_s": pytest.approx(1000 / KERNEL_S)}
    # Two launches take 20 ms. The next repetition begins with the wait that was long enough.
    assert device.occupied_s == pytest.approx([2e-3, 8e-3, 32e-3, 32e-3])


@pytest.mark.parametrize(
    ("launch_s", "stays_busy"), [(probes.MAX_BUSY_S, 1.0), (LAUNCH_S, 0.0)], ids=["slow launches", "never busy"]
)
def test_launches_are_never_measured_instead_of_kernels(launch_s: float, stays_busy: float) -> None:
    device = VirtualDevice()
    device.stays_busy = stays_busy
    message = r"the time would be that of the launches and not of the kernels: .* although it was kept busy for 0\.5 s"
    with pytest.raises(probes.ProbeError, match=message):
        updates(device, launch_s=launch_s)()
    assert device.occupied_s[-1] == probes.MAX_BUSY_S


def test_a_launch_updates_fewer_parameters_if_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    class Small(VirtualDevice):
        """A device with 10 bytes less than 1000 parameters per launch need. It releases its cache first."""

        def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
            if self.held_bytes + numel * dtype.itemsize > probes.LAUNCHES * 1000 * 16 - 10:
                self.release_cached()
                if self.held_bytes + numel * dtype.itemsize > probes.LAUNCHES * 1000 * 16 - 10:
                    raise torch.OutOfMemoryError("no memory on the device")
            return super().empty(numel, dtype)

    monkeypatch.setattr(probes, "MIN_LAUNCH_NUMEL", 100)
    device = Small()
    repeat = updates(device, numel=4000)
    # A launch of 1000 parameters does not fit, one of 500 does.
    assert 500 * 16 * probes.LAUNCHES <= device.held_bytes < 1000 * 16 * probes.LAUNCHES
    assert repeat() == {"gpu_adam_params_per_s": pytest.approx(500 / KERNEL_S)}
    monkeypatch.setattr(probes, "MIN_LAUNCH_NUMEL", 1000)
    del repeat
    with pytest.raises(torch.OutOfMemoryError):
        updates(device, numel=4000)


EFFORT = replace(SMALL, warm_ups=2, min_samples=3, max_samples=10, budget_s=1.0)


def counting_probe() -> probes.Probe:
    numbers = count()
    return lambda: dict.fromkeys(("h2d_bytes_per_s", "copy_latency_s"), next(numbers))


def test_the_slowest_rank_counts_in_each_repetition_after_the_warm_ups(monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(value: Any) -> list[Any]:
        if not isinstance(value, dict):
            return [value] * 3
        return [{name: rate + more for name, rate in value.items()} for more in (0, -5, 4)]

    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
    found = sample(counting_probe, EFFORT, mock.Mock(size=3, gather=gather))
    assert found == [{"h2d_bytes_per_s": n - 5, "copy_latency_s": n + 4} for n in range(2, 12)]


def test_cuda_releases_both_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check both calls, since no public function frees the pinned cache in every supported version of PyTorch."""
    released: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: released.append("accelerator"))
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: released.append("page-locked"), raising=False)
    CudaDevice(0).release_cached()
    assert released == ["accelerator", "page-locked"]
