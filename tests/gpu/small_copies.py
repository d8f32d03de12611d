"""Measure how long a small copy of another stream takes beside the lanes, which copy whole states in both directions.

The training loop makes such copies all the time, for a batch or for ``loss.item()``. The seconds begin when the host
issues the copy. An event on the copy's own stream would not show that moment: on a GPU that stream may share a hardware
queue with a lane, and the event then waits for the lane.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from deep_opt_states.device.interface import Device
from deep_opt_states.profiler.probes import Copies, bandwidth, d2h, h2d, record_origin
from perf_model.schedule.workload import STATES

SMALL_BYTES = 1024

DIRECTIONS = ("host to GPU", "GPU to host")
_CREATE = dict(zip(DIRECTIONS, (h2d, d2h), strict=True))


class SmallCopies:
    """Copies of ``small_bytes`` beside lanes that copy the states of one unit, of ``large_bytes`` each."""

    def __init__(self, device: Device[Any], large_bytes: int, small_bytes: int = SMALL_BYTES) -> None:
        self._device = device
        self._small_bytes = small_bytes
        self._lanes = {direction: create(device, large_bytes) for direction, create in _CREATE.items()}
        self._large_bytes = large_bytes

    def alone_s(self, direction: str, count: int) -> list[float]:
        """Return the seconds of ``count`` small copies while nothing else is copied."""
        return [self._small_copy_s(direction, ())[0] for _ in range(count)]

    def beside_lanes_s(self, direction: str, count: int) -> list[float]:
        """Return the seconds of ``count`` small copies that are issued while the lane of ``direction`` is busy.

        They are issued at evenly spread moments of the first large copy. Raise ``RuntimeError`` if that mostly fails,
        because this machine issues them too late.
        """
        large_s = self._large_bytes / self.lane_bytes_per_s(direction)
        found_s: list[float] = []
        for _ in range(5 * count):
            delay_s = large_s * (len(found_s) + 0.5) / count
            seconds, lane_was_busy = self._small_copy_s(direction, list(self._lanes.values()), delay_s)
            if lane_was_busy:
                found_s.append(seconds)
            if len(found_s) == count:
                return found_s
        raise RuntimeError(f"only {len(found_s)} of {count} small copies were issued while the lane was busy")

    def lane_bytes_per_s(self, direction: str) -> float:
        """Return the bandwidth of one lane while nothing else is copied."""
        repeat = bandwidth(self._device, [self._lanes[direction]], len(STATES), "bytes_per_s")
        repeat()
        return repeat()["bytes_per_s"]

    def _small_copy_s(self, direction: str, lanes: Sequence[Copies], delay_s: float = 0.0) -> tuple[float, bool]:
        """Return the seconds of one small copy, and whether the lane of its direction was busy when it was issued."""
        small = _CREATE[direction](self._device, self._small_bytes)
        origin, origin_s = record_origin(self._device, small)
        for lane in lanes:
            lane.begin(origin)
        for _ in STATES:
            for lane in lanes:
                lane.issue()
        time.sleep(delay_s)
        small.begin(origin)
        issued_s = time.perf_counter() - origin_s
        small.issue()
        end_s = small.times_s()[-1]
        lane_ends_s = [lane.times_s()[-1] for lane in lanes]
        return end_s - issued_s, bool(lanes) and issued_s < lane_ends_s[DIRECTIONS.index(direction)]
