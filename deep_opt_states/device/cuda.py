"""Implement the device interface for CUDA with torch's streams and events."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

import torch

from deep_opt_states.device.slab import HostSlab

CLOCK_HZ = 2e9
"""An approximate GPU clock rate: ``torch.cuda._sleep`` takes its duration in clock cycles."""

CHUNK_BYTES = 64 * 2**20
"""The bytes of a chunk, which takes 1 to 3 ms over PCIe. Smaller chunks would cost bandwidth."""


class CudaEvent:
    """A CUDA event with timing. The host sleeps for it: spinning would take a core on which threads launch kernels."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True, blocking=True)

    def synchronize(self) -> None:
        self.event.synchronize()

    def finished(self) -> bool:
        return self.event.query()

    def seconds_after(self, origin: CudaEvent) -> float:
        return origin.event.elapsed_time(self.event) / 1e3


class CudaStream:
    """A CUDA stream of the device interface."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def record(self, event: CudaEvent) -> None:
        event.event.record(self._stream)

    def wait(self, event: CudaEvent) -> None:
        self._stream.wait_event(event.event)

    def issue(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)


class CudaDevice:
    """The GPU with the given ``index`` in this process.

    A copy engine executes one copy at a time, whatever the priorities of streams, so a copy of whole states would delay
    small copies of the training script by tens of milliseconds. The empty kernel after each chunk of ``chunk_bytes``
    lets copies of other streams overtake, which NVIDIA does not document (measured: meta-pytorch/torchrec#4315).
    """

    shares_host_memory = False

    def __init__(self, index: int, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._device = torch.device("cuda", index)
        self._chunk_bytes = chunk_bytes

    def enter_thread(self) -> None:
        # Each thread has its own current device, at first GPU 0. Any other CUDA call would create a context there,
        # which takes half a gigabyte of GPU 0 per rank.
        torch.cuda.set_device(self._device)

    def stream(self) -> CudaStream:
        # CUDA starts the blocks of a stream with a higher priority when blocks of other kernels end. With the priority
        # of the model's stream, each unit's small kernel would wait for a whole product of matrices.
        return CudaStream(torch.cuda.Stream(self._device, priority=-1))

    def current_stream(self) -> CudaStream:
        return CudaStream(torch.cuda.current_stream(self._device))

    def event(self) -> CudaEvent:
        return CudaEvent()

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=self._device)

    def empty_host(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        # A copy from or to pageable memory would block the host.
        return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=True)

    def host_slab(self, size_bytes: int) -> HostSlab:
        return HostSlab(size_bytes, self._page_lock)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        if not self._divides(destination, source):
            destination.copy_(source, non_blocking=True)
            return
        destination, source = destination.view(-1), source.view(-1)
        chunk_numel = self._chunk_bytes // source.itemsize
        for begin in range(0, source.numel(), chunk_numel):
            numel = min(chunk_numel, source.numel() - begin)
            destination.narrow(0, begin, numel).copy_(source.narrow(0, begin, numel), non_blocking=True)
            self.occupy(0.0)

    def occupy(self, seconds: float) -> None:
        torch.cuda._sleep(int(seconds * CLOCK_HZ))

    def release_cached(self) -> None:
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()

    def _divides(self, destination: torch.Tensor, source: torch.Tensor) -> bool:
        """Return whether the copy is large, and a copy engine executes it rather than a kernel."""
        return (
            2 * source.nbytes > self._chunk_bytes
            and destination.device != source.device
            and destination.dtype == source.dtype
            and destination.shape == source.shape
            and destination.is_contiguous()
            and source.is_contiguous()
        )

    def _page_lock(self, address: int, size_bytes: int) -> Callable[[], object]:
        """Register the memory at ``address``, and return a function that undoes it. Raise ``CudaError`` if refused."""
        self._check(torch.cuda.cudart().cudaHostRegister(address, size_bytes, 0))

        def unlock() -> None:
            # Garbage may be collected on another thread, and while copies are in flight.
            with torch.cuda.device(self._device):
                torch.cuda.synchronize()
                self._check(torch.cuda.cudart().cudaHostUnregister(address))

        return unlock

    def _check(self, result: int) -> None:
        """Raise ``CudaError`` unless ``result`` is success. A later launch does not raise the same error again."""
        try:
            torch.cuda.check_error(result)
        except torch.cuda.CudaError:
            # PyTorch has no binding for cudaGetLastError. A launch that finds the error in CUDA's record clears it;
            # otherwise the next launch, perhaps one of NCCL, would raise it.
            with suppress(RuntimeError):
                torch.ones(1, device=self._device)
            raise


def reserved_bytes() -> int:
    """Return the bytes of the GPU that PyTorch holds now, with its cache. ``memory_stats`` would take longer."""
    stats = torch.cuda.memory_stats_as_nested_dict()
    return int(stats["reserved_bytes"]["all"]["current"]) if stats else 0


def free_bytes() -> int:
    """Return the bytes of the GPU that no process holds now."""
    return int(torch.cuda.mem_get_info()[0])


def failed_allocations() -> int:
    """Return how many allocations have raised an out-of-memory error since the process started."""
    return int(torch.cuda.memory_stats().get("num_ooms", 0))


def _peak_and_freed_bytes(stats: dict[str, int]) -> tuple[int, int]:
    """Return the most bytes that PyTorch's allocator has held, and the bytes that it has released."""
    return stats.get("reserved_bytes.all.peak", 0), stats.get("reserved_bytes.all.freed", 0)


def free_and_retries(since: tuple[int, int] | None) -> tuple[int, int]:
    """Return the bytes of the GPU that were free at PyTorch's peak, and the number of allocations that were retried.

    PyTorch retries an allocation after it has emptied its cache. ``since`` holds earlier peak and freed bytes, and
    limits the result to the peak after them. If that peak is lower, the returned bytes may be too few.
    """
    stats = torch.cuda.memory_stats()
    peak_bytes, freed_bytes = _peak_and_freed_bytes(stats)
    held_bytes = stats.get("reserved_bytes.all.current", 0)
    if since is not None and peak_bytes == since[0]:
        peak_bytes = min(peak_bytes, held_bytes + freed_bytes - since[1])
    return free_bytes() - (peak_bytes - held_bytes), stats.get("num_alloc_retries", 0)


class AllocatorWatch:
    """The GPU memory that training takes from PyTorch's allocator, without the memory of the optimizer's plans."""

    def __init__(self) -> None:
        self._changed: tuple[int, int] | None = None
        """The peak and the freed bytes when a plan last took or freed memory."""
        self._taken_bytes = 0
        """The bytes that plans have allocated, less those that they have freed."""
        self._retries_of_plans = 0
        self._failed = failed_allocations()

    @contextmanager
    def changing_plan(self) -> Iterator[None]:
        """Attribute allocations in this context to the plan, and measure peaks anew afterwards.

        PyTorch's cache is emptied before and after: states would split cached blocks of training, and cached memory of
        the plan would hide the next peak of training.
        """
        torch.cuda.empty_cache()
        allocated_bytes, failed = torch.cuda.memory_allocated(), failed_allocations()
        _, retries = free_and_retries(None)
        yield
        self._taken_bytes += torch.cuda.memory_allocated() - allocated_bytes
        torch.cuda.empty_cache()
        self._changed = _peak_and_freed_bytes(torch.cuda.memory_stats())
        self._retries_of_plans += free_and_retries(None)[1] - retries
        self._failed += failed_allocations() - failed

    def free_and_retries(self) -> tuple[int, int]:
        """Return the bytes that were free at the peak since the plan changed, and the retries of training so far."""
        free, retries = free_and_retries(self._changed)
        return free, retries - self._retries_of_plans

    def bytes_in_use(self) -> int:
        """Return the bytes that tensors use now, including the first plan: only the growth matters."""
        return torch.cuda.memory_allocated() - self._taken_bytes

    def has_failed(self) -> bool:
        """Return whether an allocation of training has failed since ``forget_failures``."""
        return failed_allocations() > self._failed

    def forget_failures(self) -> None:
        """Do not count the allocations that have failed so far."""
        self._failed = failed_allocations()
