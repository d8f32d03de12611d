"""Record every reservation that is made on a device."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, TypeVar

import torch
from torch.utils.weak import WeakIdKeyDictionary

from deep_opt_states.device.interface import Device
from deep_opt_states.device.slab import HostSlab
from perf_model.prediction.memory import MemoryKind, Reservation

OwnerT = TypeVar("OwnerT", torch.Tensor, HostSlab)


class AccountingDevice:
    """A wrapper around ``device`` that forwards every call, and records each reservation of memory."""

    def __init__(self, device: Device[Any]) -> None:
        self._device = device
        # Each copy of a step calls them, for which ``__getattr__`` is slow.
        self.copy, self.current_stream, self.event = device.copy, device.current_stream, device.event
        self._kinds: MutableMapping[Any, MemoryKind] = WeakIdKeyDictionary()

    @property
    def reserved(self) -> list[Reservation]:
        """Return one entry per tensor or slab that is reserved now, with its size in host memory or on the device."""
        # Files may have replaced a part of a slab.
        sizes = (
            (kind, owner.host_bytes if isinstance(owner, HostSlab) else owner.untyped_storage().nbytes())
            for owner, kind in self._kinds.items()
        )
        return [Reservation(kind=kind, each_bytes=size_bytes) for kind, size_bytes in sizes]

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self._account(MemoryKind.ACCELERATOR, self._device.empty(numel, dtype))

    def empty_host(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self._account(MemoryKind.PINNED, self._device.empty_host(numel, dtype))

    def host_slab(self, size_bytes: int) -> HostSlab:
        return self._account(MemoryKind.PINNED, self._device.host_slab(size_bytes))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def _account(self, kind: MemoryKind, owner: OwnerT) -> OwnerT:
        self._kinds[owner] = kind
        return owner
