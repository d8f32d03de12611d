"""CUDA by torch streams and events."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from deep_opt_states.device.slab import HostSlab

CLOCK_HZ = 2e9
"""A GPU's clock is about that fast: ``torch.cuda._sleep`` counts in its cycles."""


class CudaEvent:
    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)

    def synchronize(self) -> None:
        self.event.synchronize()

    def finished(self) -> bool:
        return self.event.query()

    def seconds_after(self, origin: CudaEvent) -> float:
        return origin.event.elapsed_time(self.event) / 1e3


class CudaStream:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def record(self, event: CudaEvent) -> None:
        event.event.record(self._stream)

    def wait(self, event: CudaEvent) -> None:
        self._stream.wait_event(event.event)

    def issue(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)


class CudaDevice:
    shares_host_memory = False
    runs_when_issued = False

    def __init__(self, index: int) -> None:
        self._device = torch.device("cuda", index)

    def stream(self) -> CudaStream:
        return CudaStream(torch.cuda.Stream(self._device))

    def current_stream(self) -> CudaStream:
        return CudaStream(torch.cuda.current_stream(self._device))

    def event(self) -> CudaEvent:
        return CudaEvent()

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=self._device)

    def empty_host(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        # Pageable memory would make every copy wait for the host, and overlap nothing.
        return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=True)

    def host_slab(self, size_bytes: int) -> HostSlab:
        return HostSlab(size_bytes, self._page_lock)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        destination.copy_(source, non_blocking=True)

    def occupy(self, seconds: float) -> None:
        torch.cuda._sleep(int(seconds * CLOCK_HZ))

    def release_cached(self) -> None:
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()

    def _page_lock(self, address: int, size_bytes: int) -> Callable[[], object]:
        """Raises ``CudaError`` where the driver or the memlock limit does not allow it."""
        cudart = torch.cuda.cudart()
        torch.cuda.check_error(cudart.cudaHostRegister(address, size_bytes, 0))
        # What copies from or to it must have finished by then.
        return lambda: torch.cuda.check_error(cudart.cudaHostUnregister(address))
