"""How long the caller's stream stands still for an update, and how long it goes on beside it.

The caller's stream computes. It waits for an update in two ways. Either it waits for the update itself, and events on
that stream mark where the wait begins and ends: a host that waits while the stream still has work delays nothing, since
the second event follows the first at once. Or it waits for the gathering stream, on which parameters that are needed
later are gathered ahead, and which may wait for the update itself. Then events on both streams mark the waits, and a
moment counts where both streams wait: an all-gather is no part of the update, and neither is what the gathering stream
waits for while the caller's stream still computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from deep_opt_states.device.interface import Device, Event
from perf_model.prediction.timeline import Phase, PhaseSpan


@dataclass(frozen=True)
class Interval:
    """Two events on one stream, around what it waits for."""

    start: Event
    end: Event


class Waits:
    """The waits for one update, at most ``max_intervals`` of them, whose events are reserved here."""

    def __init__(self, device: Device[Any], max_intervals: int) -> None:
        self._device = device
        self._reserved = [Interval(device.event(), device.event()) for _ in range(max_intervals)]
        self._used = 0
        self._waits: list[tuple[Interval, ...]] = []
        """In the order of the caller's stream, which stands still where all intervals of an entry overlap."""
        self._in_flight: list[Interval] = []
        """Waits of the gathering stream that the caller's stream has not waited for yet."""
        self.prefetch = device.event()
        self.prefetched = False

    @property
    def count(self) -> int:
        return len(self._waits)

    def begin(self, *, prefetched: bool) -> None:
        self._used = 0
        self._waits.clear()
        self._in_flight.clear()
        self.prefetched = prefetched

    @contextmanager
    def direct(self) -> Iterator[None]:
        with self._interval() as interval:
            yield
        if interval is not None:
            self._waits.append((interval,))

    @contextmanager
    def on_gathering_stream(self) -> Iterator[None]:
        with self._interval() as interval:
            yield
        if interval is not None:
            self._in_flight.append(interval)

    @contextmanager
    def for_gathering_stream(self) -> Iterator[None]:
        # What is issued on the gathering stream meanwhile is for later: the next wait for that stream covers it.
        in_flight = tuple(self._in_flight)
        self._in_flight.clear()
        if not in_flight:
            yield
            return
        with self._interval() as interval:
            yield
        if interval is not None:
            self._waits.extend((interval, gathering) for gathering in in_flight)

    def phases(self) -> tuple[PhaseSpan, ...]:
        """Return what the model did around the update, which is finished, in order and without overlaps.

        These are backward since the first prefetch, a span for each wait, and forward in between. Second 0 is where
        the first wait starts. The host waits for the events.
        """
        ((first,), *_) = self._waits
        for own, *_ in self._waits:
            # The caller's stream has waited for the gathering stream within its own interval.
            own.end.synchronize()
        spans: list[PhaseSpan] = []
        if self.prefetched:
            spans.append(PhaseSpan(Phase.BACKWARD, self.prefetch.seconds_after(first.start), 0.0))
        now_s = 0.0
        for intervals in self._waits:
            start_s = max(now_s, *(interval.start.seconds_after(first.start) for interval in intervals))
            end_s = max(start_s, min(interval.end.seconds_after(first.start) for interval in intervals))
            if start_s > now_s:
                spans.append(PhaseSpan(Phase.FORWARD, now_s, start_s))
            spans.append(PhaseSpan(Phase.EXPOSED, start_s, end_s))
            now_s = end_s
        return tuple(spans)

    @contextmanager
    def _interval(self) -> Iterator[Interval | None]:
        """Record an interval on the current stream. Yield None if all reserved events are used: only an interrupted
        update needs more, and nobody asks for its times."""
        if self._used == len(self._reserved):
            yield None
            return
        interval = self._reserved[self._used]
        self._used += 1
        stream = self._device.current_stream()
        stream.record(interval.start)
        yield interval
        stream.record(interval.end)


class Exposure:
    """The waits for the update that has begun, and those for the one before it.

    Both sets of events are reserved here, so that the waits for an update can be read while the next one goes on.
    """

    def __init__(self, device: Device[Any], max_intervals: int) -> None:
        self._device = device
        self._waits, self._others = Waits(device, max_intervals), Waits(device, max_intervals)
        self._prefetches = False

    def prefetches(self) -> None:
        """Mark where the next update begins to be prefetched. The waits for the last update but one are lost."""
        if not self._prefetches:
            self._prefetches = True
            self._device.current_stream().record(self._others.prefetch)

    def begins(self) -> None:
        """Begin with the waits for another update."""
        self._waits, self._others = self._others, self._waits
        self._waits.begin(prefetched=self._prefetches)
        self._prefetches = False

    @property
    def waits(self) -> Waits:
        """Return the waits for the latest update. They are valid until the second update after it is prefetched."""
        return self._waits

    @property
    def count(self) -> int:
        """Return the number of waits for this update so far, each with one exposed span in its phases."""
        return self._waits.count
