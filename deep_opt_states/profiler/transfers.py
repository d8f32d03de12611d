"""Copies between host and accelerator, as training issues them: in large pieces, on a stream for each direction."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import torch

from deep_opt_states.device.interface import Device, Event
from deep_opt_states.profiler.method import Rates
from deep_opt_states.profiler.ranks import ProbeError


class Copies:
    """``source`` copied to ``destination`` (fp32, [numel]) again and again, with an event after each copy."""

    def __init__(self, device: Device[Any], destination: torch.Tensor, source: torch.Tensor) -> None:
        self.stream = device.stream()
        self._device = device
        self._destination = destination
        self._source = source
        self._pattern = torch.arange(source.numel(), dtype=torch.float32, device="cpu")
        device.copy(source, self._pattern)
        destination.fill_(torch.nan)
        finish(device)
        self._marks: list[Event] = []
        self._origin: Event

    @property
    def nbytes(self) -> int:
        return self._source.nbytes

    def begin(self, origin: Event) -> None:
        """Copies from now on start after ``origin``, and ``times_s`` are counted from it."""
        self._origin = origin
        self.stream.wait(origin)
        self._marks = []
        self._mark()

    def issue(self) -> None:
        with self.stream.issue():
            self._device.copy(self._destination, self._source)
        self._mark()

    def times_s(self) -> list[float]:
        """When the first copy started and when each one ended. Waits for them."""
        self._marks[-1].synchronize()
        return [mark.seconds_after(self._origin) for mark in self._marks]

    def verify(self) -> None:
        # Never through the device where the host can look by itself: what a copy got wrong, the next may mend.
        arrived = self._destination
        if arrived.device.type != "cpu":
            arrived = torch.empty_like(self._pattern)
            self._device.copy(arrived, self._destination)
            finish(self._device)
        wrong = arrived != self._pattern
        if wrong.any():
            raise ProbeError(
                f"the copy is not what was copied: {int(wrong.sum())} of {wrong.numel()} elements are wrong, "
                f"the first of them at {int(wrong.nonzero()[0])}"
            )

    def _mark(self) -> None:
        self._marks.append(self._device.event())
        self.stream.record(self._marks[-1])


class OneWay:
    """``count`` copies one after another, nothing else running."""

    def __init__(self, device: Device[Any], copies: Copies, count: int, quantity: str) -> None:
        self._device = device
        self._copies = copies
        self._count = count
        self._quantity = quantity

    def repeat(self) -> Rates:
        return {self._quantity: self._copies.nbytes * self._count / self._elapsed_s()}

    def verify(self) -> None:
        self._copies.verify()

    def _elapsed_s(self) -> float:
        origin, _ = start(self._device, self._copies)
        self._copies.begin(origin)
        for _ in range(self._count):
            self._copies.issue()
        first_s, *_, last_s = self._copies.times_s()
        return last_s - first_s


class Latency(OneWay):
    """Seconds that a copy takes beside its bytes: of one that has next to none, with the event that follows it."""

    def repeat(self) -> Rates:
        return {self._quantity: self._elapsed_s() / self._count}


class BothWays:
    """``count`` copies each way at once. Only the time in which both directions work is counted."""

    def __init__(self, device: Device[Any], h2d: Copies, d2h: Copies, count: int) -> None:
        self._device = device
        self._directions = (h2d, d2h)
        self._count = count

    def repeat(self) -> Rates:
        issue_both(self._device, self._directions, self._count)
        times_s = [copies.times_s() for copies in self._directions]
        start_s, end_s = max(times[0] for times in times_s), min(times[-1] for times in times_s)
        return {"both_bytes_per_s": bytes_between(self._directions, times_s, start_s, end_s) / (end_s - start_s)}

    def verify(self) -> None:
        for copies in self._directions:
            copies.verify()


def pinned_h2d(device: Device[Any], nbytes: int) -> Copies:
    return Copies(device, device.empty(nbytes // 4, torch.float32), device.empty_host(nbytes // 4, torch.float32))


def pinned_d2h(device: Device[Any], nbytes: int) -> Copies:
    return Copies(device, device.empty_host(nbytes // 4, torch.float32), device.empty(nbytes // 4, torch.float32))


def pinned_both(device: Device[Any], nbytes: int) -> tuple[Copies, Copies]:
    """Host to accelerator, and accelerator to host; ``nbytes`` each."""
    return pinned_h2d(device, nbytes), pinned_d2h(device, nbytes)


def pageable_h2d(device: Device[Any], nbytes: int) -> Copies:
    return Copies(device, device.empty(nbytes // 4, torch.float32), _pageable(nbytes))


def pageable_d2h(device: Device[Any], nbytes: int) -> Copies:
    return Copies(device, _pageable(nbytes), device.empty(nbytes // 4, torch.float32))


def _pageable(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes // 4, dtype=torch.float32, device="cpu")


def start(device: Device[Any], copies: Copies) -> tuple[Event, float]:
    """One moment on two clocks: the device's (an event) and the host's (``time.perf_counter``)."""
    origin: Event = device.event()
    copies.stream.record(origin)
    origin.synchronize()
    return origin, time.perf_counter()


def issue_both(device: Device[Any], directions: tuple[Copies, Copies], count: int) -> float:
    """``count`` copies each way, by turns, so that neither direction starts much later.

    The host's time from which their ``times_s`` are counted.
    """
    origin, origin_s = start(device, directions[0])
    for copies in directions:
        copies.begin(origin)
    for _ in range(count):
        for copies in directions:
            copies.issue()
    return origin_s


def bytes_between(directions: tuple[Copies, Copies], times_s: list[list[float]], start_s: float, end_s: float) -> float:
    """What all copies moved from ``start_s`` to ``end_s``, a copy that is cut counted in proportion."""
    moved = 0.0
    for copies, times in zip(directions, times_s, strict=True):
        for begun_s, ended_s in pairwise(times):
            inside_s = min(ended_s, end_s) - max(begun_s, start_s)
            if inside_s > 0:
                moved += copies.nbytes * inside_s / (ended_s - begun_s)
    return moved


def finish(device: Device[Any]) -> None:
    """Wait for what was issued on the caller's stream."""
    event = device.event()
    device.current_stream().record(event)
    event.synchronize()
