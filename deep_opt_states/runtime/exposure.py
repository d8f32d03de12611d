"""How long the caller's stream stands still for an update, and how long it goes on beside it.

Each wait lies between two events on that stream. A host that waits while the stream still has work delays nothing: the
second event follows the first at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from deep_opt_states.device.interface import Device
from perf_model.windows import Windows


class Exposure:
    """Of one update at a time, whose waits are at most ``max_waits``: their events are reserved here."""

    def __init__(self, device: Device[Any], max_waits: int) -> None:
        self._device = device
        self._waits = [(device.event(), device.event()) for _ in range(max_waits)]
        self._count = 0
        self._prefetch, self._next_prefetch = device.event(), device.event()
        self._prefetched = self._next_prefetched = False

    def prefetches(self) -> None:
        """The next update begins to be prefetched; the last may not have been asked for yet."""
        if not self._next_prefetched:
            self._next_prefetched = True
            self._device.current_stream().record(self._next_prefetch)

    def begins(self) -> None:
        """An update; what is known of the last is lost."""
        self._count = 0
        self._prefetch, self._next_prefetch = self._next_prefetch, self._prefetch
        self._prefetched, self._next_prefetched = self._next_prefetched, False

    @contextmanager
    def wait(self) -> Iterator[None]:
        start, end = self._waits[self._count]
        self._count += 1
        stream = self._device.current_stream()
        stream.record(start)
        yield
        stream.record(end)

    def exposed(self) -> tuple[float, Windows]:
        """Of an update that is finished: seconds that the model waited for it; and for which it went on, from the first
        prefetch to the first wait, and from there to the last.
        """
        waits = self._waits[: self._count]
        first, last = waits[0][0], waits[-1][1]
        last.synchronize()
        exposed_s = sum(end.seconds_after(start) for start, end in waits)
        return exposed_s, Windows(
            backward_s=first.seconds_after(self._prefetch) if self._prefetched else 0.0,
            forward_s=max(0.0, last.seconds_after(first) - exposed_s),
        )
