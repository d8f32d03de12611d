"""How long the caller's stream stands still for an update, and how long it goes on beside it.

Each wait lies between two events on that stream. A host that waits while the stream still has work delays nothing: the
second event follows the first at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from deep_opt_states.device.interface import Device
from perf_model.timeline import Phase, PhaseSpan


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

    @property
    def count(self) -> int:
        """Waits of this update so far."""
        return self._count

    @contextmanager
    def wait(self) -> Iterator[None]:
        if self._count == len(self._waits):
            yield  # of an update that was interrupted, whose times nobody asks for
            return
        start, end = self._waits[self._count]
        self._count += 1
        stream = self._device.current_stream()
        stream.record(start)
        yield
        stream.record(end)

    def phases(self) -> tuple[PhaseSpan, ...]:
        """What the model did around the update, which is finished: backward since the first prefetch, waits, and
        forward in between. Second 0 is the first wait's start. The host waits for all of them."""
        waits = self._waits[: self._count]
        origin = waits[0][0]
        for _, end in waits:
            end.synchronize()
        spans: list[PhaseSpan] = []
        if self._prefetched:
            spans.append(PhaseSpan(Phase.BACKWARD, self._prefetch.seconds_after(origin), 0.0))
        now_s = 0.0
        for start, end in waits:
            start_s, end_s = start.seconds_after(origin), end.seconds_after(origin)
            if start_s > now_s:
                spans.append(PhaseSpan(Phase.FORWARD, now_s, start_s))
            spans.append(PhaseSpan(Phase.EXPOSED, start_s, end_s))
            now_s = end_s
        return tuple(spans)
