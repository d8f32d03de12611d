"""Measure how long the caller's stream waits for an update, and how long it computes while the update runs.

The caller's stream may wait for the update itself, between two events on that stream: a host that waits while it still
has work delays nothing. Or it waits for the gathering stream, which may itself wait for the update: events on both
streams mark the waits, and only the time in which both wait counts. An all-gather is not part of the update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from deep_opt_states.device.interface import Device, Event
from perf_model.prediction.timeline import IterationTimes, Phase, PhaseSpan, Timeline

OnFinished = Callable[[tuple[PhaseSpan, ...], Callable[[], Timeline]], None]
"""Receives the phases of training around one update, and a function that returns its timeline."""


@dataclass(frozen=True)
class Interval:
    """Two events on one stream, recorded before and after it waits."""

    start: Event
    end: Event


class UpdateWaits:
    """The waits for one update, with events that serve the second update after it again."""

    def __init__(self, device: Device[Any]) -> None:
        self._device = device
        self._intervals: list[Interval] = []
        self.prefetch = device.event()
        """Caller's stream: prefetching for this update starts. Only ``phases`` reads it."""
        self._backward = device.event()
        """Caller's stream: the first backward after this update starts."""
        self.start(prefetched=False)

    def start(self, *, prefetched: bool) -> None:
        """Start with the waits for a new update. ``prefetched``: ``prefetch`` was recorded for that update."""
        self._used = self._unfinished = 0
        """The number of intervals of this update, the first ones, and of those that an exception may leave open."""
        self._waits: list[tuple[Interval, ...]] = []
        """The waits in the order of the caller's stream, which is blocked while all intervals of an entry overlap."""
        self._in_flight: list[Interval] = []
        """Waits of the gathering stream that the caller's stream has not waited for yet."""
        self.prefetched, self._backward_started = prefetched, False
        self.read_timeline: Callable[[], Timeline] | None = None
        """Returns the timeline of the update; None before its end, after a failure, and once it was reported."""

    def backward_starts(self) -> None:
        """Mark the start of the first backward after this update."""
        if not self._backward_started:
            self._backward_started = True
            self._device.current_stream().record(self._backward)

    def report(self, on_finished: OnFinished) -> None:
        """Call ``on_finished`` once, unless an interrupt has left the times unknown. The host waits for the events."""
        read_timeline, self.read_timeline = self.read_timeline, None
        if read_timeline is not None and self._unfinished == 0:
            on_finished(self.phases(), read_timeline)

    def direct(self) -> AbstractContextManager[None]:
        """Record a wait of the caller's stream for the update itself, inside the context."""
        return self._interval(lambda interval: self._waits.append((interval,)))

    def on_gathering_stream(self) -> AbstractContextManager[None]:
        """Record a wait of the gathering stream, which is current, for the update itself, inside the context."""
        return self._interval(self._in_flight.append)

    @contextmanager
    def for_gathering_stream(self) -> Iterator[None]:
        """Record a wait of the caller's stream for the gathering stream, inside the context."""
        # Waits of the gathering stream inside the context belong to the next wait for that stream.
        in_flight = tuple(self._in_flight)
        self._in_flight.clear()
        if not in_flight:
            yield
            return
        with self._interval(lambda interval: self._waits.extend((interval, gathering) for gathering in in_flight)):
            yield

    def iteration_until(self, following: UpdateWaits) -> IterationTimes | None:
        """Return the iteration between this update and the ``following`` one; None while it is unknown."""
        # Where the host does not wait for the norm, the device may not have decided the following update yet.
        if not self._waits or not following._waits or following._unfinished:
            return None
        ((first, *_), *_), ((decided, *_), *_) = self._waits, following._waits
        if not decided.start.finished():
            return None
        backward_start_s = self._backward.seconds_after(first.start) if self._backward_started else None
        return IterationTimes(backward_start_s, decided.start.seconds_after(first.start))

    def phases(self) -> tuple[PhaseSpan, ...]:
        """Return backward since the first prefetch, one exposed span per wait, and forward in between, in order."""
        # Second 0 is the start of the first wait. The host waits for the events.
        ((first,), *_) = self._waits
        for of_caller, *_ in self._waits:
            # The caller's stream has waited for the gathering stream within its own interval.
            of_caller.end.synchronize()
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
    def _interval(self, add: Callable[[Interval], object]) -> Iterator[None]:
        """Record an interval on the current stream, and ``add`` it at its end."""
        if self._used == len(self._intervals):
            self._intervals.append(Interval(self._device.event(), self._device.event()))
        interval = self._intervals[self._used]
        self._used += 1
        self._unfinished += 1
        stream = self._device.current_stream()
        stream.record(interval.start)
        yield
        stream.record(interval.end)
        add(interval)
        self._unfinished -= 1


class Exposure:
    """The ``waits`` for the latest update, and ``previous_waits``, until the next update is prefetched or starts."""

    def __init__(self, device: Device[Any]) -> None:
        self._device = device
        self.waits, self.previous_waits = UpdateWaits(device), UpdateWaits(device)
        self._prefetch_marked = False
        self.iteration: IterationTimes | None = None
        """The iteration after the update that is being reported; None while it is unknown."""

    def mark_prefetch(self) -> bool:
        """Mark where prefetching for the next update starts, or return False if it is marked."""
        if is_first := not self._prefetch_marked:
            self._prefetch_marked = True
            self.previous_waits.read_timeline = None
            self._device.current_stream().record(self.previous_waits.prefetch)
        return is_first

    def forget_prefetch(self) -> None:
        """Let the next prefetch be marked: no update has followed the one that was."""
        self._prefetch_marked = False

    def begin_update(self) -> None:
        self.waits, self.previous_waits = self.previous_waits, self.waits
        self.waits.start(prefetched=self._prefetch_marked)
        self._prefetch_marked = False

    def report_previous(self, on_finished: OnFinished) -> None:
        """Report the update before the latest one, with its ``iteration``."""
        if self.previous_waits.read_timeline is not None:
            self.iteration = self.previous_waits.iteration_until(self.waits)
            self.previous_waits.report(on_finished)
            self.iteration = None
