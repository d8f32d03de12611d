"""Implement the device interface for the CPU accelerator, where every operation runs when it is issued."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext

import torch

from deep_opt_states.device.slab import HostSlab


class HostEvent:
    """An event that holds the time at which it was recorded. The work that it marks had finished by then."""

    at_s = 0.0

    def synchronize(self) -> None:
        pass

    def finished(self) -> bool:
        return True

    def seconds_after(self, origin: HostEvent) -> float:
        return self.at_s - origin.at_s


class HostStream:
    """A stream that runs each operation when it is issued, on the issuing thread."""

    def record(self, event: HostEvent) -> None:
        event.at_s = time.perf_counter()

    def wait(self, event: HostEvent) -> None:
        pass

    def issue(self) -> AbstractContextManager[object]:
        return nullcontext()


class HostDevice:
    """The CPU as an accelerator, whose memory is host memory."""

    shares_host_memory = True

    def enter_thread(self) -> None:
        pass

    def stream(self) -> HostStream:
        return HostStream()

    current_stream = stream

    def event(self) -> HostEvent:
        return HostEvent()

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device="cpu")

    empty_host = empty

    def host_slab(self, size_bytes: int) -> HostSlab:
        # No transfer needs this memory, so it is not page-locked.
        return HostSlab(size_bytes)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        destination.copy_(source)

    def occupy(self, seconds: float) -> None:
        """Do nothing: there is no queue, so the next operation would wait on this thread."""

    def release_cached(self) -> None:
        """Do nothing: PyTorch does not cache the CPU's memory."""
