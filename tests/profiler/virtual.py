"""A device whose work is done at once and takes time on a clock of its own, so that what a probe measures is exact."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from deep_opt_states.device.kernels.adam import AdamTensors, Part
from tests.runtime.adam import PlainAdam


class VirtualEvent:
    def __init__(self, device: VirtualDevice) -> None:
        self._device = device
        self.at_s = 0.0

    def synchronize(self) -> None:
        self._device.now_s = max(self._device.now_s, self.at_s)

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

    @contextmanager
    def issue(self) -> Iterator[None]:
        """All that is issued takes ``issue_s``, and copies ``copy_s`` on top, on this stream."""
        previous, self._device.issuing = self._device.issuing, self
        self.free_at_s = self.starts_s() + self._device.issue_s
        try:
            yield
        finally:
            self._device.issuing = previous


class VirtualDevice:
    """``copy_s``: seconds a copy takes, by its stream's number (the caller's is 0), else by its bytes at 10 GB/s."""

    def __init__(self, copy_s: Sequence[float] = (), issue_s: float = 0.0) -> None:
        self.now_s = 0.0
        self.copy_s = copy_s
        self.issue_s = issue_s
        self.issuing = VirtualStream(self)
        self._streams = [self.issuing]

    def stream(self) -> VirtualStream:
        self._streams.append(VirtualStream(self))
        return self._streams[-1]

    def current_stream(self) -> VirtualStream:
        return self.issuing

    def event(self) -> VirtualEvent:
        return VirtualEvent(self)

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype)

    empty_host = empty

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        destination.copy_(source)
        number = self._streams.index(self.issuing)
        seconds = self.copy_s[number] if self.copy_s else source.nbytes / 1e10
        self.work(seconds)

    def work(self, duration_s: float) -> None:
        """Occupy the stream that is current for so long."""
        self.issuing.free_at_s = self.issuing.starts_s() + duration_s


class TimedAdam(PlainAdam):
    """Takes ``update_s`` of the host's time for a sub-group."""

    def __init__(self, device: VirtualDevice, update_s: float) -> None:
        super().__init__()
        self._device = device
        self._update_s = update_s

    def update(self, sub_group: int, tensors: AdamTensors, part: Part | None = None) -> None:
        super().update(sub_group, tensors, part)
        self._device.now_s += self._update_s
