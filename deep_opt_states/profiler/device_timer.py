"""Time the work that an accelerator executes, independently of how slowly Python issues it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deep_opt_states.device.interface import Device, Stream
from deep_opt_states.profiler.ranks import ProbeError

INITIAL_BUSY_S, MAX_BUSY_S = 2e-3, 0.5
"""Seconds that the stream is kept busy at first and at most while work is issued."""


class DeviceTimer:
    """A timer of the work on ``stream``, which is kept busy until all of the work is queued.

    Otherwise the stream would wait for each launch, which takes Python tens of microseconds, and the launches would be
    timed instead: a kernel that updates millions of parameters can take less.
    """

    def __init__(self, device: Device[Any], stream: Stream[Any]) -> None:
        self._device = device
        self._stream = stream
        self._busy_s = INITIAL_BUSY_S

    def seconds_of(self, issue: Callable[[], object]) -> float:
        """Return the seconds between the start and the end of the work that ``issue`` issues on the current stream.

        If the stream became idle before all work was issued, the time is discarded and everything is issued again
        behind a longer wait. Raise ``ProbeError`` if even the longest wait is too short.
        """
        while True:
            elapsed_s, was_queued = self._time(issue)
            if was_queued or self._device.runs_when_issued:
                return elapsed_s
            if self._busy_s >= MAX_BUSY_S:
                raise ProbeError(
                    f"the time would be that of the launches and not of the kernels: the stream was idle before all "
                    f"work was issued, although it was kept busy for {self._busy_s:.3g} s"
                )
            self._busy_s = min(4 * self._busy_s, MAX_BUSY_S)

    def _time(self, issue: Callable[[], object]) -> tuple[float, bool]:
        """Return the seconds, and whether all work was issued before any of it could start."""
        begin, end = self._device.event(), self._device.event()
        with self._stream.issue():
            self._device.occupy(self._busy_s)
            self._stream.record(begin)
            issue()
            was_queued = not begin.finished()
            self._stream.record(end)
        end.synchronize()
        return end.seconds_after(begin), was_queued
