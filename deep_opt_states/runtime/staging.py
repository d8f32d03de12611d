"""Copies gradients to host memory through a few buffers on the accelerator that are reserved at start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from deep_opt_states.device.interface import Device
from perf_model.prediction.memory import NUM_STAGING_BUFFERS


@dataclass
class Traffic:
    """Bytes of gradients that were copied between host memory and the accelerator, by direction, and in how many
    copies."""

    d2h_bytes: int = 0
    d2h_copies: int = 0
    h2d_bytes: int = 0
    h2d_copies: int = 0


class Staging:
    """A ring of buffers, of ``buffer_numel`` elements each, and a stream that copies from them to host memory.

    A gradient is copied into a buffer on the stream that has reduced it, so that its own memory can be used again, and
    from there to host memory on a stream of its own, so that the next reduction need not wait for the link. Before a
    buffer is written to again, the writing stream waits until the buffer has been copied down; the host never waits.
    So no more than these buffers is ever in flight, and where the link is slower than backward, the reduction's stream
    falls behind. DeepSpeed limits how many buckets that may be, and with them the gradients that wait on the
    accelerator.

    ``perf_model.prediction.memory.staging_numel`` decides how large the buffers are: no larger than those that
    DeepSpeed itself allocates on the accelerator for the same purpose.
    """

    def __init__(self, device: Device[Any], buffer_numel: int, dtype: torch.dtype) -> None:
        self.traffic = Traffic()
        self._device = device
        self._d2h = device.stream()
        self._buffers = [device.empty(buffer_numel, dtype) for _ in range(NUM_STAGING_BUFFERS)]
        self._free = [device.event() for _ in self._buffers]
        """Events recorded after the last use of each buffer."""
        self._staged, self._gone_down = device.event(), device.event()
        self._current = 0
        """The buffer that is filled next, or is being filled with ``_filled`` elements: they belong to ``_host`` from
        ``_begin`` on."""
        self._filled = 0
        self._host: torch.Tensor | None = None
        self._begin = 0

    def send(self, host: torch.Tensor, offset: int, values: torch.Tensor) -> None:
        """Copy ``values``, shape [numel], to ``host`` from ``offset`` on.

        They may be written to as soon as this returns, on the stream that is current now. What lies next to each other
        in host memory and is sent one after another goes down in one copy, which is issued by ``flush`` at the latest.
        """
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
        """Issue the copy of what is in a buffer and has not been sent yet; on the stream that has sent it."""
        if self._filled == 0:
            return
        assert self._host is not None
        destination = self._host.narrow(0, self._begin, self._filled)
        self._device.current_stream().record(self._staged)
        self._d2h.wait(self._staged)
        with self._d2h.issue():
            self._device.copy(destination, self._buffers[self._current].narrow(0, 0, self._filled))
        self._d2h.record(self._free[self._current])
        self.traffic.d2h_bytes += destination.nbytes
        self.traffic.d2h_copies += 1
        self._begin += self._filled
        self._filled = 0
        self._current = self._next

    def add_to(self, values: torch.Tensor, host: torch.Tensor) -> None:
        """Add ``host`` to ``values`` on the accelerator, shape [numel] both, on the current stream.

        What was sent to ``host`` must have arrived there on that stream.
        """
        # Not through the buffer that is being filled.
        buffer = self._buffers[self._next]
        self._wait_until_free(self._next)
        for begin in range(0, host.numel(), buffer.numel()):
            numel = min(buffer.numel(), host.numel() - begin)
            piece = buffer.narrow(0, 0, numel)
            self._device.copy(piece, host.narrow(0, begin, numel))
            values.narrow(0, begin, numel).add_(piece)
            self.traffic.h2d_bytes += piece.nbytes
            self.traffic.h2d_copies += 1
        self._device.current_stream().record(self._free[self._next])

    def arrive(self) -> None:
        """Let the current stream wait until all that was flushed is in host memory."""
        self._d2h.record(self._gone_down)
        self._device.current_stream().wait(self._gone_down)

    def wait(self) -> None:
        """Let the host wait until all that was flushed is in host memory."""
        self._d2h.record(self._gone_down)
        self._gone_down.synchronize()

    def close(self) -> None:
        """Give the buffers back, once nothing is in flight."""
        self.wait()
        self._buffers.clear()
        self._host = None

    def _wait_until_free(self, index: int) -> None:
        """Let the current stream wait: what is copied from the buffer must not be overwritten before it is there."""
        self._device.current_stream().wait(self._free[index])

    @property
    def _next(self) -> int:
        return (self._current + 1) % NUM_STAGING_BUFFERS
