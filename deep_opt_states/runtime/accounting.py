"""Record every reservation that is made on a device."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from deep_opt_states.device.interface import Device, Stream
from deep_opt_states.device.slab import HostSlab
from perf_model.prediction.memory import MemoryKind, Reservation


class AccountingDevice:
    """A wrapper around ``device`` that forwards every call, and records each reservation of memory."""

    def __init__(self, device: Device[Any]) -> None:
        self._device = device
        self._reserved: list[tuple[Reservation, Callable[[], object]]] = []
        """Each reservation, with a function that returns None once the memory is free."""

    @property
    def reserved(self) -> list[Reservation]:
        """Return one entry per tensor or slab that is reserved now, with its size in host memory or on the device."""
        reserved = []
        for reservation, find_owner in self._reserved:
            if (owner := find_owner()) is not None:
                # Since it was reserved, files may have replaced a part of a slab.
                on_disk = owner.size_bytes - owner.host_bytes if isinstance(owner, HostSlab) else 0
                reserved.append(replace(reservation, each_bytes=reservation.each_bytes - on_disk))
        return reserved

    @property
    def shares_host_memory(self) -> bool:
        return self._device.shares_host_memory

    @property
    def runs_when_issued(self) -> bool:
        return self._device.runs_when_issued

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self._account(MemoryKind.ACCELERATOR, self._device.empty(numel, dtype))

    def empty_host(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self._account(MemoryKind.PINNED, self._device.empty_host(numel, dtype))

    def host_slab(self, size_bytes: int) -> HostSlab:
        slab = self._device.host_slab(size_bytes)
        self._reserved.append((Reservation(kind=MemoryKind.PINNED, each_bytes=size_bytes), weakref.ref(slab)))
        return slab

    def enter_thread(self) -> None:
        self._device.enter_thread()

    def stream(self) -> Stream[Any]:
        return self._device.stream()

    def current_stream(self) -> Stream[Any]:
        return self._device.current_stream()

    def event(self) -> Any:
        return self._device.event()

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        self._device.copy(destination, source)

    def copy_each(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._device.copy_each(copies)

    def occupy(self, seconds: float) -> None:
        self._device.occupy(seconds)

    def release_cached(self) -> None:
        self._device.release_cached()

    def _account(self, kind: MemoryKind, tensor: torch.Tensor) -> torch.Tensor:
        reservation = Reservation(kind=kind, each_bytes=tensor.untyped_storage().nbytes())
        self._reserved = [(known, owner) for known, owner in self._reserved if owner() is not None]
        self._reserved.append((reservation, weakref.ref(tensor)))
        return tensor
