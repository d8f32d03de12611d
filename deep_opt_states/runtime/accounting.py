"""A device that keeps account of what is reserved on it."""

from __future__ import annotations

from typing import Any

import torch

from deep_opt_states.device.interface import Device, Stream
from deep_opt_states.device.slab import HostSlab
from perf_model.prediction.memory import Reservation, Where


class Ledger:
    """Wraps ``device``; ``reserved`` has one entry a tensor or slab, with its bytes, also of what was given back."""

    def __init__(self, device: Device[Any]) -> None:
        self._device = device
        self.reserved: list[Reservation] = []

    @property
    def shares_host_memory(self) -> bool:
        return self._device.shares_host_memory

    @property
    def runs_when_issued(self) -> bool:
        return self._device.runs_when_issued

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self._account(Where.ACCELERATOR, self._device.empty(numel, dtype))

    def empty_host(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self._account(Where.PINNED, self._device.empty_host(numel, dtype))

    def host_slab(self, size_bytes: int) -> HostSlab:
        self.reserved.append(Reservation(where=Where.PINNED, each_bytes=size_bytes))
        return self._device.host_slab(size_bytes)

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

    def occupy(self, seconds: float) -> None:
        self._device.occupy(seconds)

    def release_cached(self) -> None:
        self._device.release_cached()

    def _account(self, where: Where, tensor: torch.Tensor) -> torch.Tensor:
        self.reserved.append(Reservation(where=where, each_bytes=tensor.untyped_storage().nbytes()))
        return tensor
