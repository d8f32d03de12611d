"""Model by how much an update slows down the backward and the forward that run meanwhile.

CPU updates and copies of states take bandwidth of host memory, caches and cores, and the host that launches the model's
kernels needs them also. How much that costs depends on the machine and on the model, so it is measured in the run: in
forward, and assumed to be the same in backward.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul
from typing import NamedTuple

from perf_model.prediction.timeline import Phase, PhaseSpan, Timeline
from perf_model.schedule.action import Lane
from perf_model.units import percent

COPYING = (Lane.H2D, Lane.D2H)
"""The lanes that copy states. The few bytes of publications count as a part of the CPU updates that they follow."""

LEAST_SPEED = 0.05
"""The least speed of the model during an update: a fit to noisy times must not stop it."""


@dataclass(frozen=True, kw_only=True)
class Slowdown:
    """The shares of the model's speed that are lost while the CPU updates, and while states are copied. They add up."""

    cpu: float = 0.0
    copies: float = 0.0

    def speed(self, *, cpu: bool, copies: bool) -> float:
        """Return the speed of the model relative to one without an update."""
        return max(LEAST_SPEED, 1.0 - self.cpu * cpu - self.copies * copies)

    def __str__(self) -> str:
        return f"{percent(self.cpu)} slower during CPU updates and {percent(self.copies)} during copies"


NO_SLOWDOWN = Slowdown()

TYPICAL = Slowdown(cpu=0.4)
"""The slowdown of a forward that shows no other, about the same as on our hosts with one GPU."""

UNCERTAINTY = 0.1
"""The noise of a measured forward, about 3 % of it, divided by how far slowdowns are from ``TYPICAL``, about 0.3."""


class SlowedForward(NamedTuple):
    """The seconds that one forward lost to an update, and those that it ran during CPU updates and during copies."""

    lost_s: float
    cpu_s: float
    copies_s: float

    @classmethod
    def measured(cls, phases: Sequence[PhaseSpan], timeline: Timeline, alone_s: float) -> SlowedForward:
        """Return the times of a forward in ``phases``, which takes ``alone_s`` without an update."""
        forwards = [(span.start_s, span.end_s) for span in phases if span.phase is Phase.FORWARD]
        lost_s = sum(end_s - start_s for start_s, end_s in forwards) - alone_s
        cpu_s, copies_s, any_s = (
            _overlap_s(forwards, timeline.busy_spans(*lanes)) for lanes in ((Lane.CPU,), COPYING, (Lane.CPU, *COPYING))
        )
        # Forward cannot lose more than the time of the update: the rest is other work of the script.
        return cls(min(max(0.0, lost_s), any_s), cpu_s, copies_s)


def fit_slowdown(forwards: Sequence[SlowedForward]) -> Slowdown:
    """Return the slowdown that explains ``forwards`` best: least squares, with shares between 0 and 1.

    A penalty for shares other than ``TYPICAL`` (ridge regression) decides as far as forwards do not separate the two
    kinds, because all ran alongside the same plan, or hardly ran during one kind.
    """
    longest_s = max((max(forward.cpu_s, forward.copies_s) for forward in forwards), default=0.0)
    if longest_s == 0.0:
        return NO_SLOWDOWN
    penalty = (UNCERTAINTY * longest_s) ** 2
    lost, cpu, copies = zip(*forwards, strict=True)
    both = _sum_of_products(cpu, copies)
    cpu_cpu, copies_copies = (_sum_of_products(kind, kind) + penalty for kind in (cpu, copies))
    lost_cpu = _sum_of_products(lost, cpu) + penalty * TYPICAL.cpu
    lost_copies = _sum_of_products(lost, copies) + penalty * TYPICAL.copies
    determinant = cpu_cpu * copies_copies - both**2
    by_cpu = (lost_cpu * copies_copies - lost_copies * both) / determinant
    by_copies = (lost_copies * cpu_cpu - lost_cpu * both) / determinant
    if by_copies < 0.0:
        by_cpu, by_copies = lost_cpu / cpu_cpu, 0.0
    elif by_cpu < 0.0:
        by_cpu, by_copies = 0.0, lost_copies / copies_copies
    return Slowdown(cpu=min(1.0, by_cpu), copies=min(1.0, by_copies))


def _sum_of_products(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(map(mul, left, right), 0.0)


class ModelProgress:
    """The seconds of the model's work that are done at each moment, if it computes all the time during the update."""

    def __init__(self, timeline: Timeline, slowdown: Slowdown) -> None:
        self._times_s, self._done_s, self._speeds = [timeline.start_s], [0.0], [1.0]
        if slowdown == NO_SLOWDOWN:
            return
        edges = [(timeline.start_s, 0, 0)]
        for is_copy, lanes in enumerate(((Lane.CPU,), COPYING)):
            for start_s, end_s in timeline.busy_spans(*lanes):
                edges += [(start_s, is_copy, 1), (end_s, is_copy, -1)]
        busy = [0, 0]
        for time_s, is_copy, change in sorted(edges):
            self._done_s.append(self._done_at(time_s))
            self._times_s.append(time_s)
            busy[is_copy] += change
            self._speeds.append(slowdown.speed(cpu=busy[0] > 0, copies=busy[1] > 0))

    def end_s(self, start_s: float, seconds: float) -> float:
        """Return when work ends that starts at ``start_s`` and takes ``seconds`` without an update."""
        if len(self._times_s) == 1:
            return start_s + seconds
        done_s = self._done_at(start_s) + seconds
        position = bisect_right(self._done_s, done_s) - 1
        return self._times_s[position] + (done_s - self._done_s[position]) / self._speeds[position]

    def lost_s(self, start_s: float, end_s: float) -> float:
        """Return the seconds of work that are lost from ``start_s`` to ``end_s``."""
        if len(self._times_s) == 1:
            return 0.0
        return max(0.0, end_s - start_s - (self._done_at(end_s) - self._done_at(start_s)))

    def _done_at(self, time_s: float) -> float:
        position = bisect_right(self._times_s, time_s) - 1
        return self._done_s[position] + (time_s - self._times_s[position]) * self._speeds[position]


def _overlap_s(spans: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> float:
    """Return the seconds that two sequences have in common, each in order and without overlaps."""
    total_s, first = 0.0, 0
    for start_s, end_s in spans:
        while first < len(others) and others[first][1] <= start_s:
            first += 1
        for other_start_s, other_end_s in others[first:]:
            if other_start_s >= end_s:
                break
            total_s += min(end_s, other_end_s) - max(start_s, other_start_s)
    return total_s
