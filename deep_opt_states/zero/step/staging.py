"""Copy gradients to host memory through a few buffers on the accelerator that are reserved at start."""

from __future__ import annotations

from typing import Any

import torch

from deep_opt_states.device.interface import Device, Event
from perf_model.prediction.memory import NUM_STAGING_BUFFERS


class Staging:
    """A ring of buffers on the accelerator through which a separate stream copies gradients to the host.

    A gradient is copied into a buffer on the stream that has reduced it, so that its memory can be reused. The copy to
    the host overlaps with backward. Before a buffer is overwritten, the writing stream waits for that copy; the host
    never does.
    """

    def __init__(self, device: Device[Any], buffer_numel: int, dtype: torch.dtype) -> None:
        self._device = device
        self._d2h = device.stream()
        self._buffers = [device.empty(buffer_numel, dtype) for _ in range(NUM_STAGING_BUFFERS)]
        self._free = [device.event() for _ in self._buffers]
        """Last reader of each buffer -> its next writer: the buffer may be overwritten."""
        self._staged = device.event()
        """Writing stream -> d2h stream: the buffer is filled and may be copied to the host."""
        self._copied_to_host = device.event()
        """The d2h stream -> current stream or host: all flushed gradients are in host memory."""
        self._current = 0
        """The buffer that is filled now or next. Its first ``_filled`` elements go to ``_host`` from ``_begin`` on."""
        self._filled = 0
        self._host: torch.Tensor | None = None
        """The destination of unflushed elements, which must stay referenced."""
        self._begin = 0

    def send(self, host: torch.Tensor, offset: int, values: torch.Tensor) -> None:
        """Copy ``values``, of shape [numel], to ``host`` from ``offset`` on. The current stream may overwrite them."""
        # Values for adjacent elements of ``host`` are combined into one copy, which ``flush`` issues at the latest.
        if host is not self._host or offset != self._begin + self._filled:
            self.flush()
            self._host, self._begin = host, offset
        while values.numel() > 0:
            buffer = self._buffers[self._current]
            if self._filled == 0:
                self._wait_until_free(self._current)
            numel = min(values.numel(), buffer.numel() - self._filled)
            self._device.copy(buffer.narrow(0, self._filled, numel), values.narrow(0, 0, numel))
            self._filled += numel
            values = values.narrow(0, numel, values.numel() - numel)
            if self._filled == buffer.numel():
                self.flush()

    def flush(self) -> None:
        """Issue the copy of the values that are in a buffer only. The stream of ``send`` is current."""
        if self._filled == 0:
            return
        assert self._host is not None
        destination = self._host.narrow(0, self._begin, self._filled)
        self._device.current_stream().record(self._staged)
        self._d2h.wait(self._staged)
        with self._d2h.issue():
            self._device.copy(destination, self._buffers[self._current].narrow(0, 0, self._filled))
        self._d2h.record(self._free[self._current])
        self._begin += self._filled
        self._filled = 0
        self._current = self._next

    def add_to(self, values: torch.Tensor, host: torch.Tensor) -> None:
        """Add ``host`` to ``values`` on the accelerator, both of shape [numel], after ``wait_for_copies``."""
        # The current buffer may hold values that have not been flushed, so the next one is used.
        buffer = self._buffers[self._next]
        self._wait_until_free(self._next)
        for begin in range(0, host.numel(), buffer.numel()):
            numel = min(buffer.numel(), host.numel() - begin)
            piece = buffer.narrow(0, 0, numel)
            self._device.copy(piece, host.narrow(0, begin, numel))
            values.narrow(0, begin, numel).add_(piece)
        self._device.current_stream().record(self._free[self._next])

    def record_copies(self, event: Event) -> None:
        self._d2h.record(event)

    def wait_for_copies(self) -> None:
        """Make the current stream wait until all flushed gradients are in host memory."""
        self._d2h.record(self._copied_to_host)
        self._device.current_stream().wait(self._copied_to_host)

    def synchronize(self) -> None:
        """Block the host until all flushed gradients are in host memory."""
        self._d2h.record(self._copied_to_host)
        self._copied_to_host.synchronize()

    def close(self) -> None:
        """Wait until nothing is in flight, and free the buffers."""
        self.synchronize()
        self._buffers.clear()
        self._host = None

    def _wait_until_free(self, index: int) -> None:
        """Make the current stream wait for the last copy from the buffer, before it overwrites the buffer."""
        self._device.current_stream().wait(self._free[index])

    @property
    def _next(self) -> int:
        return (self._current + 1) % NUM_STAGING_BUFFERS
