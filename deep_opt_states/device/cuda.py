"""CUDA by torch streams and events."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial

import torch

from deep_opt_states.device.slab import HostSlab

CLOCK_HZ = 2e9
"""A GPU's clock is about that fast: ``torch.cuda._sleep`` counts in its cycles."""


class CudaEvent:
    """A host thread that waits for it sleeps. Spinning, it would take a core from the threads that launch kernels.

    A rank has few cores to launch from, and on them also run the threads of autograd, NCCL and pinned batches.
    """

    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True, blocking=True)

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

    def enter_thread(self) -> None:
        # The current device is each thread's own, and is at first GPU 0: what the thread asks CUDA for without naming
        # a device would create a context there, half a gigabyte of GPU 0 for each rank.
        torch.cuda.set_device(self._device)

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
        self._check(torch.cuda.cudart().cudaHostRegister(address, size_bytes, 0))
        return partial(self._page_unlock, address)

    def _page_unlock(self, address: int) -> None:
        """Wait for the copies from and to the memory at ``address``, and unregister it."""
        # On the thread that collects garbage, this may not be the current device.
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            self._check(torch.cuda.cudart().cudaHostUnregister(address))

    def _check(self, result: int) -> None:
        """Raise ``CudaError`` unless ``result`` is success; CUDA's own record of the error is cleared then.

        PyTorch looks at that record after each kernel launch. If the refusal stayed there, the next launch, which may
        be NCCL's while the ranks agree on the refusal, would raise this stale error instead of the refusal.
        """
        try:
            torch.cuda.check_error(result)
        except torch.cuda.CudaError:
            # PyTorch has no binding for cudaGetLastError. A launch that finds an error raises and clears it.
            with suppress(RuntimeError):
                torch.ones(1, device=self._device)
            raise


def free_and_retries() -> tuple[int, int]:
    """Return the bytes of the GPU that were free at PyTorch's peak, and the number of allocations that were retried.

    PyTorch retries an allocation after it has emptied its cache. A script may empty the cache, too, so the memory that
    is free at one moment does not show the peak.
    """
    free_bytes, _ = torch.cuda.mem_get_info()
    stats = torch.cuda.memory_stats()
    below_peak = stats.get("reserved_bytes.all.peak", 0) - stats.get("reserved_bytes.all.current", 0)
    return free_bytes - below_peak, stats.get("num_alloc_retries", 0)
