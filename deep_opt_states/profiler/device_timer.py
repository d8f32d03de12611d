"""How long an accelerator takes for what is issued, however slowly Python issues it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deep_opt_states.device.interface import Device, Stream
from deep_opt_states.profiler.ranks import ProbeError

FIRST_BUSY_S, MOST_BUSY_S = 2e-3, 0.5


class DeviceTimer:
    """Times work on ``stream``, which is kept busy until all of the work is queued.

    Otherwise the stream would wait for each launch, which takes Python tens of microseconds, and the launches would be
    timed: a kernel that updates millions of parameters can take less.
    """

    def __init__(self, device: Device[Any], stream: Stream[Any]) -> None:
        self._device = device
        self._stream = stream
        self._busy_s = FIRST_BUSY_S

    def seconds_of(self, issue: Callable[[], object]) -> float:
        """Return the seconds between the start and the end of what ``issue`` issues on the stream that is current.

        Where the stream was free before all was issued, this time is of no use: everything is issued again, behind a
        longer wait. Raises ``ProbeError`` where even the longest is too short.
        """
        while True:
            elapsed_s, was_queued = self._time(issue)
            if was_queued or self._device.runs_when_issued:
                return elapsed_s
            if self._busy_s >= MOST_BUSY_S:
                raise ProbeError(
                    f"launches would be measured, not what is launched: the stream was free before all was issued, "
                    f"although it was to be busy for {self._busy_s:.3g} s"
                )
            self._busy_s = min(4 * self._busy_s, MOST_BUSY_S)

    def _time(self, issue: Callable[[], object]) -> tuple[float, bool]:
        """Return the seconds, and whether all was issued before the first of it could start."""
        begin, end = self._device.event(), self._device.event()
        with self._stream.issue():
            self._device.occupy(self._busy_s)
            self._stream.record(begin)
            issue()
            was_queued = not begin.finished()
            self._stream.record(end)
        end.synchronize()
        return end.seconds_after(begin), was_queued
