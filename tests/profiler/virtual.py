"""Provide a device whose work ends immediately but takes time on a virtual clock, so that measured rates are exact."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from unittest import mock

import numpy as np
import torch

from deep_opt_states.device.kernels.adam import AdamTensors, ElementRange
from deep_opt_states.device.slab import HostSlab
from deep_opt_states.profiler import profile
from deep_opt_states.profiler.profile import ProbeEffort
from tests.runtime.plain_adam import PlainAdam

SMALL = ProbeEffort(
    warm_ups=1,
    min_samples=5,
    max_samples=9,
    budget_s=0.01,
    update_numel=80_000,
    launch_numel=10_000,
    copy_bytes=2**20,
    matrix_size=64,
)


class VirtualEvent:
    def __init__(self, device: VirtualDevice) -> None:
        self._device = device
        self.at_s = 0.0

    def synchronize(self) -> None:
        self._device.now_s = max(self._device.now_s, self.at_s)

    def finished(self) -> bool:
        return self.at_s <= self._device.now_s

    def seconds_after(self, origin: VirtualEvent) -> float:
        return self.at_s - origin.at_s


class VirtualStream:
    def __init__(self, device: VirtualDevice) -> None:
        self._device = device
        self.free_at_s = 0.0

    def record(self, event: VirtualEvent) -> None:
        event.at_s = self.starts_s()

    def wait(self, event: VirtualEvent) -> None:
        self.free_at_s = max(self.free_at_s, event.at_s)

    def starts_s(self) -> float:
        return max(self.free_at_s, self._device.now_s)

    def run(self, seconds: float) -> None:
        self.free_at_s = self.starts_s() + seconds

    @contextmanager
    def issue(self) -> Iterator[None]:
        """Make this stream current and occupy it for ``issue_s``; copies then take ``copy_s`` in addition."""
        previous, self._device.issuing = self._device.issuing, self
        self.run(self._device.issue_s)
        try:
            yield
        finally:
            self._device.issuing = previous


class VirtualDevice:
    """A device whose work takes time on a virtual clock, ``now_s``.

    ``copy_s`` gives the seconds per copy by the number of the stream (the caller's is 0); if it is empty, copies run at
    10 GB/s. ``occupy`` keeps the stream busy for the share ``stays_busy`` of the requested time. As with PyTorch's
    allocators, ``held_bytes`` counts cached memory until ``release_cached``. ``registered`` are page-locked slabs.
    """

    shares_host_memory = False

    def __init__(self, copy_s: Sequence[float] = (), issue_s: float = 0.0) -> None:
        self.now_s = 0.0
        self.copy_s = copy_s
        self.issue_s = issue_s
        self.stays_busy = 1.0
        self.occupied_s: list[float] = []
        self.issuing = VirtualStream(self)
        self._streams = [self.issuing]
        self._allocated_bytes = self._cached_bytes = self._slab_bytes = 0
        self.most_held_bytes = 0
        self.registered: list[tuple[int, int]] = []

    @property
    def held_bytes(self) -> int:
        return self._allocated_bytes + self._cached_bytes + self._slab_bytes

    def enter_thread(self) -> None:
        """Do nothing: there is only one device."""

    def stream(self) -> VirtualStream:
        self._streams.append(VirtualStream(self))
        return self._streams[-1]

    def current_stream(self) -> VirtualStream:
        return self.issuing

    def event(self) -> VirtualEvent:
        return VirtualEvent(self)

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        buffer = np.empty(max(1, numel * dtype.itemsize), dtype=np.uint8)
        self._allocated_bytes += buffer.nbytes
        self.most_held_bytes = max(self.most_held_bytes, self.held_bytes)
        weakref.finalize(buffer, self._free, buffer.nbytes).atexit = False
        return torch.frombuffer(buffer, dtype=torch.uint8)[: numel * dtype.itemsize].view(dtype)

    empty_host = empty

    def host_slab(self, size_bytes: int) -> HostSlab:
        slab = HostSlab(size_bytes, lambda *place: self._register(*place))
        assert slab._memory is not None
        self._slab_bytes += size_bytes
        weakref.finalize(slab._memory, self._unmap, size_bytes).atexit = False
        return slab

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        destination.copy_(source)
        number = self._streams.index(self.issuing)
        self.issuing.run(self.copy_s[number] if self.copy_s else source.nbytes / 1e10)

    def launch(self, launch_s: float, kernel_s: float) -> None:
        self.now_s += launch_s
        self.issuing.run(kernel_s)

    def occupy(self, seconds: float) -> None:
        self.occupied_s.append(seconds)
        self.issuing.run(self.stays_busy * seconds)

    def release_cached(self) -> None:
        self._cached_bytes = 0

    def _free(self, nbytes: int) -> None:
        self._allocated_bytes -= nbytes
        self._cached_bytes += nbytes

    def _unmap(self, nbytes: int) -> None:
        self._slab_bytes -= nbytes

    def _register(self, address: int, size_bytes: int) -> Callable[[], object]:
        self.registered.append((address, size_bytes))
        return lambda: self.registered.remove((address, size_bytes))


kernels = partial(mock.patch.multiple, profile)
"""Replace functions that create Adam kernels: ``training_cpu_adam``, ``stock_cpu_adam``, ``training_gpu_adam``."""


@contextmanager
def virtual_clock(
    device: VirtualDevice, *, tick_s: float, launch_s: float, product_s: float
) -> Iterator[VirtualDevice]:
    """Make the clock of ``device`` the host's clock, which reading advances, and launch matrix products on it."""

    def read_clock() -> float:
        device.now_s += tick_s
        return device.now_s

    def launch_product(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> None:
        torch.matmul(left, right, out=out)
        device.launch(launch_s, product_s)

    with mock.patch.object(time, "perf_counter", read_clock), mock.patch.object(torch, "mm", launch_product):
        yield device


class TimedAdam(PlainAdam):
    """A kernel that takes ``host_s`` of the host's time per sub-group, and then ``device_s`` of the device's."""

    def __init__(self, device: VirtualDevice, host_s: float, device_s: float = 0.0) -> None:
        super().__init__()
        self._device, self._host_s, self._device_s = device, host_s, device_s

    def update(self, sub_group: int, tensors: AdamTensors, element_range: ElementRange | None = None) -> None:
        super().update(sub_group, tensors, element_range)
        self._device.launch(self._host_s, self._device_s)
