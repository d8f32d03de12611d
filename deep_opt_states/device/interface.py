"""Define the device interface that the executor is written against: streams, events, memory and copies.

As on CUDA, a stream runs work in the order of issue, and a wait for an event that was not recorded ends immediately.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch

from deep_opt_states.device.slab import HostSlab


class Event(Protocol):
    """A mark behind the work that was issued on a stream so far, which streams and the host can wait for."""

    def synchronize(self) -> None:
        """Block the host until the work that the event marks has finished."""

    def finished(self) -> bool:
        """Return whether that work has finished, without waiting for it."""

    def seconds_after(self, origin: Any) -> float:
        """Return the seconds from ``origin`` to this event. Both must be finished and of one device."""


EventT = TypeVar("EventT", bound=Event)
EventT_contra = TypeVar("EventT_contra", bound=Event, contravariant=True)


class Stream(Protocol[EventT_contra]):
    """A queue of operations that run in order, concurrently with other streams."""

    def record(self, event: EventT_contra) -> None:
        """Mark everything that has been issued on this stream so far with ``event``."""

    def wait(self, event: EventT_contra) -> None:
        """Make the operations that are issued on this stream from now on wait until ``event`` has finished."""

    def issue(self) -> AbstractContextManager[object]:
        """Return a context inside which torch operations are issued on this stream."""


class Device(Protocol[EventT]):
    """An accelerator. Inside a step only ``copy``, ``current_stream`` and ``event`` are called."""

    @property
    def shares_host_memory(self) -> bool:
        """Return whether the accelerator is the CPU, which runs operations when they are issued."""

    def enter_thread(self) -> None:
        """Make this device current on the calling thread. Call this before the thread waits for any of its events."""

    def stream(self) -> Stream[EventT]:
        """Return a new stream."""

    def current_stream(self) -> Stream[EventT]:
        """Return the current stream of the calling thread, on which the training loop computes."""

    def event(self) -> EventT:
        """Return a new event that measures time."""

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialised memory on the accelerator, of shape [numel]."""

    def empty_host(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialised host memory, of shape [numel], that ``copy`` moves without blocking the host."""

    def host_slab(self, size_bytes: int) -> HostSlab:
        """Return host memory for many tensors. Once it is locked, ``copy`` moves it without blocking the host."""

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Copy on the current stream, within the accelerator or between it and the host, also to another dtype."""

    def occupy(self, seconds: float) -> None:
        """Keep the current stream busy for about ``seconds``."""

    def release_cached(self) -> None:
        """Return page-locked memory and accelerator memory that no tensor uses any more to the system."""
