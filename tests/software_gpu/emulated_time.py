"""Measure the emulated duration of work on the device, on a clock that does not depend on how fast this machine is."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.software_gpu import device
from tests.software_gpu.settings import MachineRates, changed


def elapsed_ms(issue: Callable[[], object], rates: MachineRates, *, execute_first: bool = False) -> float:
    """Return the emulated duration of the work that ``issue`` enqueues on the current stream."""
    # The first call of an operator takes long, since PyTorch then imports its meta kernel.
    issue()
    with changed(rates=rates, execute_first=execute_first):
        for sleep_s in (0.2, 2, 20):
            begin, end = device.Event(enable_timing=True), device.Event(enable_timing=True)
            issued_from_s = time.monotonic()
            device._sleep(int(sleep_s * 2e9))
            begin.record()
            issue()
            end.record()
            issued_s = time.monotonic() - issued_from_s
            end.synchronize()
            # If all was in the queue before the first task started, nothing started late because it was issued late.
            if issued_s < sleep_s:
                return begin.elapsed_time(end)
    raise AssertionError("this machine is too slow to issue the work")


def milliseconds(expected: float) -> object:
    """Return an object that is equal to durations in milliseconds that differ from this one by rounding alone."""
    return pytest.approx(expected, rel=1e-6)
