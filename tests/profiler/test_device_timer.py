"""Test with a virtual clock, in exact numbers, that the accelerator's work is timed and not Python's launches."""

from __future__ import annotations

import pytest
import torch

from deep_opt_states.device.cpu import HostDevice
from deep_opt_states.profiler import probes
from deep_opt_states.profiler.probes import (
    INITIAL_BUSY_S,
    LAUNCHES,
    MAX_BUSY_S,
    KernelTimer,
    Probe,
    ProbeError,
    device_updates,
    matrix_products,
)
from tests.fake_device.device import FakeDevice, LateAdam
from tests.fake_device.timing import Late, Seeded
from tests.profiler.virtual import LaunchedAdam, VirtualDevice, virtual_clock
from tests.runtime.plain_adam import PlainAdam

NUMEL = 1000

LAUNCH_S, KERNEL_S = 6e-5, 1e-5
"""Seconds of a launch and of the kernel: the host launches an update more slowly than the device executes it."""


def updates(device: VirtualDevice, *, launch_s: float = LAUNCH_S, numel: int = NUMEL) -> Probe:
    return device_updates(device, numel, LaunchedAdam(device, launch_s=launch_s, kernel_s=KERNEL_S))


def test_the_rate_of_updates_is_the_kernel_s_and_not_that_of_the_launches() -> None:
    device = VirtualDevice()
    repeat = updates(device)
    assert repeat() == {"gpu_adam_params_per_s": pytest.approx(NUMEL / KERNEL_S)}
    assert device.occupied_s == [INITIAL_BUSY_S], "two launches take less"


def test_the_rate_of_a_matrix_product_is_the_kernel_s_and_not_that_of_the_launch() -> None:
    device = VirtualDevice()
    with virtual_clock(device, tick_s=0, launch_s=LAUNCH_S, product_s=KERNEL_S):
        repeat = matrix_products(device, {"matmul_flops_per_s": 16, "matmul_small_flops_per_s": 8})
        assert repeat() == {
            "matmul_flops_per_s": pytest.approx(2 * 16**3 / KERNEL_S),
            "matmul_small_flops_per_s": pytest.approx(2 * 8**3 / KERNEL_S),
        }


def test_a_stream_that_became_idle_too_early_is_kept_busy_for_longer() -> None:
    device = VirtualDevice()
    repeat = updates(device, launch_s=10e-3)
    for _ in range(2):
        assert repeat() == {"gpu_adam_params_per_s": pytest.approx(NUMEL / KERNEL_S)}
    # Two launches take 20 ms. The next repetition begins with the wait that was long enough.
    assert device.occupied_s == pytest.approx([2e-3, 8e-3, 32e-3, 32e-3])


@pytest.mark.parametrize(
    ("launch_s", "stays_busy"), [(MAX_BUSY_S, 1.0), (LAUNCH_S, 0.0)], ids=["slow launches", "never busy"]
)
def test_launches_are_never_measured_instead_of_kernels(launch_s: float, stays_busy: float) -> None:
    device = VirtualDevice()
    device.stays_busy = stays_busy
    message = r"the time would be that of the launches and not of the kernels: .* although it was kept busy for 0\.5 s"
    with pytest.raises(ProbeError, match=message):
        updates(device, launch_s=launch_s)()
    assert device.occupied_s[-1] == MAX_BUSY_S


def test_work_that_runs_when_it_is_issued_is_timed_without_queueing() -> None:
    """Check that the timer accepts the CPU, on which nothing is ever queued."""
    device = HostDevice()
    issued = []
    assert KernelTimer(device).seconds_of(lambda: issued.append(1)) >= 0
    assert issued == [1]


@pytest.mark.parametrize("timing", [Late(), Late([1, 0]), *map(Seeded, range(5))], ids=repr)
def test_updates_have_finished_when_the_clock_is_read(timing: Late | Seeded) -> None:
    device = FakeDevice(timing)
    repeat = device_updates(device, NUMEL, LateAdam(device, PlainAdam()))
    try:
        repeat()
    except ProbeError:
        # A device with random delays may become idle too early each time.
        assert isinstance(timing, Seeded)


def test_a_launch_updates_fewer_parameters_if_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    class Small(VirtualDevice):
        """A device with 10 bytes less than 1000 parameters per launch need."""

        def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
            if self.held_bytes + numel * dtype.itemsize > LAUNCHES * 1000 * 16 - 10:
                # PyTorch releases its cache first.
                self.release_cached()
                if self.held_bytes + numel * dtype.itemsize > LAUNCHES * 1000 * 16 - 10:
                    raise torch.OutOfMemoryError("no memory on the device")
            return super().empty(numel, dtype)

    monkeypatch.setattr(probes, "MIN_LAUNCH_NUMEL", 100)
    device = Small()
    repeat = updates(device, numel=4000)
    # A launch of 1000 parameters does not fit, one of 500 does.
    assert 500 * 16 * LAUNCHES <= device.held_bytes < 1000 * 16 * LAUNCHES
    assert repeat() == {"gpu_adam_params_per_s": pytest.approx(500 / KERNEL_S)}
    monkeypatch.setattr(probes, "MIN_LAUNCH_NUMEL", 1000)
    del repeat
    with pytest.raises(torch.OutOfMemoryError):
        updates(device, numel=4000)
