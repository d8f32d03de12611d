"""The device interface that the executor is written against.

Semantics are CUDA's. Work issued on a stream runs in issue order, later than the call returns; an event marks
the work issued on a stream so far; a stream or the host can wait for an event. An event that was never
recorded holds nobody back.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch

from deep_opt_states.device.slab import HostSlab


class Event(Protocol):
    def synchronize(self) -> None:
        """Block the host until the work that the event marks has finished."""

    def finished(self) -> bool:
        """Return whether that work has finished, without waiting for it."""

    def seconds_after(self, origin: Any) -> float:
        """Seconds between two finished events of one device."""


EventT = TypeVar("EventT", bound=Event)
EventT_contra = TypeVar("EventT_contra", bound=Event, contravariant=True)


class Stream(Protocol[EventT_contra]):
    def record(self, event: EventT_contra) -> None:
        """Let ``event`` mark everything issued on this stream so far."""

    def wait(self, event: EventT_contra) -> None:
        """Hold back what is issued on this stream from now on until ``event`` has finished."""

    def issue(self) -> AbstractContextManager[object]:
        """Torch operations inside the context are issued on this stream."""


class Device(Protocol[EventT]):
    """Inside a step only ``copy`` and ``current_stream`` are called; all that is reserved is reserved at start-up.

    ``shares_host_memory``: whether the CPU can write what the accelerator computes with. ``runs_when_issued``: whether
    operations run on the thread that issues them, so that nothing is ever queued.
    """

    @property
    def shares_host_memory(self) -> bool: ...

    @property
    def runs_when_issued(self) -> bool: ...

    def enter_thread(self) -> None:
        """Make this device the calling thread's own, before the thread waits for any of its events."""

    def stream(self) -> Stream[EventT]:
        """A new stream."""

    def current_stream(self) -> Stream[EventT]:
        """The stream that the training loop computes on."""

    def event(self) -> EventT:
        """A new event that measures time."""

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised memory on the accelerator, shape [numel]."""

    def empty_host(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised host memory, shape [numel], that ``copy`` moves without blocking the host."""

    def host_slab(self, size_bytes: int) -> HostSlab:
        """Host memory for many tensors, that ``copy`` moves without blocking the host once it is locked."""

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Copy between host and accelerator on the issuing stream; converts where the dtypes differ."""

    def occupy(self, seconds: float) -> None:
        """Keep the issuing stream busy for about this long, so that what is issued next is queued behind it."""

    def release_cached(self) -> None:
        """Return memory, page-locked and on the accelerator, that no tensor uses any more to the system."""
