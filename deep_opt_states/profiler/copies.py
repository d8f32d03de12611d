"""Time work on a device, and measure copies between host and accelerator: one stream per direction, as in training."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

import torch

from deep_opt_states.device.interface import Device, Event
from deep_opt_states.profiler.ranks import ProbeError

Rates: TypeAlias = Mapping[str, float]
"""Values by the names in ``perf_model.prediction.hardware.QUANTITIES``."""

Probe: TypeAlias = Callable[[], Rates]
"""A function that repeats one kind of work once, times it, and returns the values."""

INITIAL_BUSY_S, MAX_BUSY_S = 2e-3, 0.5
"""Seconds that the stream is kept busy at first and at most while work is issued."""


def timed(
    device: Device[Any], issue: Callable[[], object], first: Callable[[], object] = lambda: None
) -> tuple[float, bool]:
    """Return the device's seconds for the work that ``issue`` issues on the current stream.

    ``first`` issues work that is not timed and behind which the rest is queued: the stream would otherwise wait for
    each launch, which takes Python tens of microseconds. Also return whether all work was queued before any of it could
    start.
    """
    begin, end = device.event(), device.event()
    stream = device.current_stream()
    first()
    stream.record(begin)
    issue()
    was_queued = not begin.finished()
    stream.record(end)
    end.synchronize()
    return end.seconds_after(begin), was_queued


class KernelTimer:
    """A timer of kernels and not of their launches: it keeps the current stream busy until all work is queued."""

    def __init__(self, device: Device[Any]) -> None:
        self._device = device
        self._busy_s = INITIAL_BUSY_S

    def seconds_of(self, issue: Callable[[], object]) -> float:
        """Return the seconds of the work that ``issue`` issues.

        If the stream became idle before all work was issued, the time is discarded and everything is issued again
        behind a longer wait. Raise ``ProbeError`` if even the longest wait is too short.
        """
        while True:
            elapsed_s, was_queued = timed(self._device, issue, partial(self._device.occupy, self._busy_s))
            if was_queued or self._device.runs_when_issued:
                return elapsed_s
            if self._busy_s >= MAX_BUSY_S:
                raise ProbeError(
                    f"the time would be that of the launches and not of the kernels: the stream was idle before all "
                    f"work was issued, although it was kept busy for {self._busy_s:.3g} s"
                )
            self._busy_s = min(4 * self._busy_s, MAX_BUSY_S)


class Copies:
    """Repeated copies of ``source`` to ``destination`` (fp32, [numel]) on a stream, with an event after each copy."""

    def __init__(self, device: Device[Any], destination: torch.Tensor, source: torch.Tensor) -> None:
        self.stream = device.stream()
        self.nbytes = source.nbytes
        self._device = device
        self._destination, self._source = destination.fill_(0), source.fill_(1)
        synchronize(device)
        self._marks: list[Event] = []
        self._origin: Event

    def begin(self, origin: Event) -> None:
        """Make the following copies start after ``origin``, from which ``times_s`` then counts."""
        self._origin = origin
        self.stream.wait(origin)
        self._marks = []
        self._mark()

    def issue(self) -> None:
        """Issue one copy on the stream."""
        with self.stream.issue():
            self._device.copy(self._destination, self._source)
        self._mark()

    def times_s(self) -> list[float]:
        """Wait for all copies, and return when the first copy started and when each copy ended."""
        self._marks[-1].synchronize()
        return [mark.seconds_after(self._origin) for mark in self._marks]

    def _mark(self) -> None:
        self._marks.append(self._device.event())
        self.stream.record(self._marks[-1])


def h2d(device: Device[Any], nbytes: int, *, pinned: bool = True) -> Copies:
    """Return copies of ``nbytes`` bytes each from host memory, pinned or pageable, to the accelerator."""
    return Copies(device, device.empty(nbytes // 4, torch.float32), _on_host(device, nbytes, pinned))


def d2h(device: Device[Any], nbytes: int, *, pinned: bool = True) -> Copies:
    """Return copies of ``nbytes`` bytes each from the accelerator to host memory, pinned or pageable."""
    return Copies(device, _on_host(device, nbytes, pinned), device.empty(nbytes // 4, torch.float32))


def _on_host(device: Device[Any], nbytes: int, pinned: bool) -> torch.Tensor:
    if pinned:
        return device.empty_host(nbytes // 4, torch.float32)
    return torch.empty(nbytes // 4, dtype=torch.float32, device="cpu")


def synchronize(device: Device[Any]) -> None:
    """Wait for the work that was issued on the caller's stream."""
    event = device.event()
    device.current_stream().record(event)
    event.synchronize()


def record_origin(device: Device[Any], copies: Copies) -> tuple[Event, float]:
    """Return the present moment on the device's clock (an event) and on the host's (``time.perf_counter``)."""
    origin: Event = device.event()
    copies.stream.record(origin)
    origin.synchronize()
    return origin, time.perf_counter()


def issue_copies(device: Device[Any], directions: Sequence[Copies], count: int) -> float:
    """Issue ``count`` copies per direction and return the host's time from which their ``times_s`` count.

    The directions alternate, so that none starts much later than the others.
    """
    origin, origin_s = record_origin(device, directions[0])
    for copies in directions:
        copies.begin(origin)
    for _ in range(count):
        for copies in directions:
            copies.issue()
    return origin_s


def window_s(directions: Sequence[Copies]) -> tuple[float, float]:
    """Wait for the copies, and return when the last direction started and when the first one ended."""
    times_s = [copies.times_s() for copies in directions]
    return max(times[0] for times in times_s), min(times[-1] for times in times_s)


def bytes_between(directions: Sequence[Copies], start_s: float, end_s: float) -> float:
    """Return the bytes that all copies moved in this time. A copy that is partly inside counts in proportion."""
    moved = 0.0
    for copies in directions:
        for begun_s, ended_s in pairwise(copies.times_s()):
            inside_s = min(ended_s, end_s) - max(begun_s, start_s)
            if inside_s > 0:
                moved += copies.nbytes * inside_s / (ended_s - begun_s)
    return moved


def bandwidth(device: Device[Any], directions: Sequence[Copies], count: int, quantity: str) -> Probe:
    """Return a probe of ``count`` copies in each direction at the same time: the bytes per second of all directions.

    Only the time counts in which all directions work.
    """

    def repeat() -> Rates:
        issue_copies(device, directions, count)
        start_s, end_s = window_s(directions)
        return {quantity: bytes_between(directions, start_s, end_s) / (end_s - start_s)}

    return repeat


def latency(device: Device[Any], copies: Copies, count: int = 64) -> Probe:
    """Return a probe of the fixed cost of a copy: it times copies of few bytes, with the events that follow them."""
    repeat = bandwidth(device, [copies], count, "bytes_per_s")
    return lambda: {"copy_latency_s": copies.nbytes / repeat()["bytes_per_s"]}
