"""Measure backward and forward without an update alongside, and how much an update slows down the forward.

The first updates end inside ``step()``, so that forward and backward run alone: a forward that an update has stretched
would seem to hide all of that update. Later updates are deferred: the time that their forwards lose is the slowdown.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from deep_opt_states.device.interface import Device
from deep_opt_states.zero.step.exposure import Interval
from perf_model.prediction.overlap_windows import Windows
from perf_model.prediction.slowdown import SlowedForward, fit_slowdown
from perf_model.prediction.timeline import Phase, PhaseSpan, Timeline, seconds_of

FIRST_UPDATES = 3

SLOWED_FORWARDS = 8
"""The number of last forwards that the slowdown is fitted to, with copies of states alongside and without."""


class MeasuredWindows:
    """The windows of one rank, measured by events on the stream that computes, in the next ``updates`` updates.

    If there are none, nothing needs the windows. ``needs_forward``: whether updates overlap with forward.
    """

    def __init__(self, device: Device[Any], updates: int, *, needs_forward: bool) -> None:
        self._device = device
        self._forward = Interval(device.event(), device.event())
        self._is_used, self._needs_forward = updates > 0, needs_forward
        self._measure(updates)
        self._slowed: dict[bool, deque[SlowedForward]] = {
            has_copies: deque(maxlen=SLOWED_FORWARDS) for has_copies in (False, True)
        }

    @property
    def is_measuring(self) -> bool:
        """Return whether the next update has to end inside ``step()``; the same on every rank."""
        return self._updates_left > 0

    def measure_again(self) -> None:
        """Measure anew in the next step. The last update was reported, and no flush is in flight."""
        self._measure(int(self._is_used))

    def _measure(self, updates: int) -> None:
        self._updates_left = self._samples = updates
        self._has_started = self._has_ended = self._is_disturbed = False
        """Whether the start and the end of ``_forward`` are recorded, and whether other work came in between."""
        self._backward_s: list[float] = []
        self._forward_s: list[float] = []

    def update_starts(self) -> None:
        """Count an update that has to end inside ``step()``, where no interrupt on one rank can prevent it."""
        self._updates_left = max(0, self._updates_left - 1)

    def forward_starts(self) -> None:
        """Start to measure a forward: an update has ended inside ``step()``."""
        if self._needs_forward and len(self._forward_s) < self._samples:
            self._start_forward()

    def before_forward(self, *, trains: bool) -> None:
        """Measure from here if an evaluation, or a reader of states, came after the update."""
        if not trains:
            self.disturb()
        elif self._is_disturbed:
            self._start_forward()

    def disturb(self) -> None:
        """Measure from the next forward that trains: states are read, or a model is evaluated."""
        self._is_disturbed = self._has_started and not self._has_ended

    def backward_starts(self) -> None:
        """End the measurement of a forward, before the first backward after it."""
        if self._has_started and not self._has_ended:
            self._device.current_stream().record(self._forward.end)
            self._has_ended, self._is_disturbed = True, False

    def _start_forward(self) -> None:
        self._device.current_stream().record(self._forward.start)
        self._has_started, self._has_ended, self._is_disturbed = True, False, False

    def read_forward(self) -> None:
        """Read the measured forward. The host may wait for the start of the last backward."""
        if self._has_started and self._has_ended:
            self._forward.end.synchronize()
            self._forward_s.append(self._forward.end.seconds_after(self._forward.start))
            self._has_started = self._has_ended = False

    def updated(self, phases: Sequence[PhaseSpan], read_timeline: Callable[[], Timeline]) -> None:
        """Add the times around one update."""
        if seconds_of(Phase.FORWARD, phases) == 0.0:
            if len(self._backward_s) < self._samples:
                self._backward_s.append(seconds_of(Phase.BACKWARD, phases))
        elif self._forward_s:
            slowed = SlowedForward.measured(phases, read_timeline(), median(self._forward_s))
            self._slowed[slowed.copies_s > 0.0].append(slowed)

    def windows(self) -> Windows | None:
        """Return the medians, None until they are measured."""
        self.read_forward()
        if self._is_used and not (self._backward_s and (self._forward_s or not self._needs_forward)):
            return None
        return Windows(
            backward_s=median(self._backward_s or [0.0]),
            forward_s=median(self._forward_s or [0.0]),
            slowdown=fit_slowdown([slowed for forwards in self._slowed.values() for slowed in forwards]),
        )
