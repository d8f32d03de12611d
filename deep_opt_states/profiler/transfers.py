"""Measure copies between host and accelerator that are large and use one stream per direction, as in training."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import torch

from deep_opt_states.device.interface import Device, Event
from deep_opt_states.profiler.method import Rates
from deep_opt_states.profiler.ranks import ProbeError


class Copies:
    """Repeated copies of ``source`` to ``destination`` (fp32, [numel]), with an event after each copy."""

    def __init__(self, device: Device[Any], destination: torch.Tensor, source: torch.Tensor) -> None:
        self.stream = device.stream()
        self._device = device
        self._destination = destination
        self._source = source
        self._pattern = torch.arange(source.numel(), dtype=torch.float32, device="cpu")
        device.copy(source, self._pattern)
        destination.fill_(torch.nan)
        synchronize(device)
        self._marks: list[Event] = []
        self._origin: Event

    @property
    def nbytes(self) -> int:
        """Return the bytes of one copy."""
        return self._source.nbytes

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

    def verify(self) -> None:
        """Raise ``ProbeError`` if an element did not arrive."""
        # Read host memory directly: a second copy through the device could repair the errors of the first.
        arrived = self._destination
        if arrived.device.type != "cpu":
            arrived = torch.empty_like(self._pattern)
            self._device.copy(arrived, self._destination)
            synchronize(self._device)
        wrong = arrived != self._pattern
        if wrong.any():
            raise ProbeError(
                f"the copy differs from its source: {int(wrong.sum())} of {wrong.numel()} elements are wrong, "
                f"the first of them at index {int(wrong.nonzero()[0])}"
            )

    def _mark(self) -> None:
        self._marks.append(self._device.event())
        self.stream.record(self._marks[-1])


class OneWay:
    """A probe that times ``count`` copies one after another while nothing else runs."""

    def __init__(self, device: Device[Any], copies: Copies, count: int, quantity: str) -> None:
        self._device = device
        self._copies = copies
        self._count = count
        self._quantity = quantity

    def repeat(self) -> Rates:
        """Run the copies and return the bytes per second."""
        return {self._quantity: self._copies.nbytes * self._count / self._elapsed_s()}

    def verify(self) -> None:
        """Raise ``ProbeError`` if a copied element is wrong."""
        self._copies.verify()

    def _elapsed_s(self) -> float:
        origin, _ = record_origin(self._device, self._copies)
        self._copies.begin(origin)
        for _ in range(self._count):
            self._copies.issue()
        first_s, *_, last_s = self._copies.times_s()
        return last_s - first_s


class Latency(OneWay):
    """A probe of the fixed cost of a copy: it times copies of few bytes, with the events that follow them."""

    def repeat(self) -> Rates:
        """Run the copies and return the seconds per copy."""
        return {self._quantity: self._elapsed_s() / self._count}


class BothWays:
    """A probe that runs ``count`` copies per direction at once. Only the time counts in which both directions work."""

    def __init__(self, device: Device[Any], h2d: Copies, d2h: Copies, count: int) -> None:
        self._device = device
        self._directions = (h2d, d2h)
        self._count = count

    def repeat(self) -> Rates:
        """Run the copies and return the bytes per second, summed over both directions."""
        issue_both(self._device, self._directions, self._count)
        times_s = [copies.times_s() for copies in self._directions]
        start_s, end_s = max(times[0] for times in times_s), min(times[-1] for times in times_s)
        return {"both_bytes_per_s": bytes_between(self._directions, times_s, start_s, end_s) / (end_s - start_s)}

    def verify(self) -> None:
        """Raise ``ProbeError`` if a copied element is wrong."""
        for copies in self._directions:
            copies.verify()


def pinned_h2d(device: Device[Any], nbytes: int) -> Copies:
    """Return copies of ``nbytes`` bytes each from pinned host memory to the accelerator."""
    return Copies(device, device.empty(nbytes // 4, torch.float32), device.empty_host(nbytes // 4, torch.float32))


def pinned_d2h(device: Device[Any], nbytes: int) -> Copies:
    """Return copies of ``nbytes`` bytes each from the accelerator to pinned host memory."""
    return Copies(device, device.empty_host(nbytes // 4, torch.float32), device.empty(nbytes // 4, torch.float32))


def pinned_both(device: Device[Any], nbytes: int) -> tuple[Copies, Copies]:
    """Return copies from host to accelerator and from accelerator to host, ``nbytes`` bytes each, in pinned memory."""
    return pinned_h2d(device, nbytes), pinned_d2h(device, nbytes)


def pageable_h2d(device: Device[Any], nbytes: int) -> Copies:
    """Return copies of ``nbytes`` bytes each from pageable host memory to the accelerator."""
    return Copies(device, device.empty(nbytes // 4, torch.float32), _pageable(nbytes))


def pageable_d2h(device: Device[Any], nbytes: int) -> Copies:
    """Return copies of ``nbytes`` bytes each from the accelerator to pageable host memory."""
    return Copies(device, _pageable(nbytes), device.empty(nbytes // 4, torch.float32))


def _pageable(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes // 4, dtype=torch.float32, device="cpu")


def record_origin(device: Device[Any], copies: Copies) -> tuple[Event, float]:
    """Return the present moment on the device's clock (an event) and on the host's (``time.perf_counter``)."""
    origin: Event = device.event()
    copies.stream.record(origin)
    origin.synchronize()
    return origin, time.perf_counter()


def issue_both(device: Device[Any], directions: tuple[Copies, Copies], count: int) -> float:
    """Issue ``count`` copies per direction and return the host's time from which their ``times_s`` count.

    The directions alternate, so that neither starts much later than the other.
    """
    origin, origin_s = record_origin(device, directions[0])
    for copies in directions:
        copies.begin(origin)
    for _ in range(count):
        for copies in directions:
            copies.issue()
    return origin_s


def bytes_between(directions: tuple[Copies, Copies], times_s: list[list[float]], start_s: float, end_s: float) -> float:
    """Return the bytes that all copies moved from ``start_s`` to ``end_s``.

    A copy that is only partly inside this interval counts in proportion.
    """
    moved = 0.0
    for copies, times in zip(directions, times_s, strict=True):
        for begun_s, ended_s in pairwise(times):
            inside_s = min(ended_s, end_s) - max(begun_s, start_s)
            if inside_s > 0:
                moved += copies.nbytes * inside_s / (ended_s - begun_s)
    return moved


def synchronize(device: Device[Any]) -> None:
    """Wait for the work that was issued on the caller's stream."""
    event = device.event()
    device.current_stream().record(event)
    event.synchronize()
