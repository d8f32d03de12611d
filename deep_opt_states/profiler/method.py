"""Sample a probe: warm up, repeat on all ranks at the same time, and verify the results."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from deep_opt_states.profiler.ranks import Ranks, call_on_all_ranks
from perf_model.prediction.hardware import MATMUL_SIZE

METHOD = 8
"""The version of the method, increased when a probe begins to measure something else: cached profiles are then measured
again."""

Rates: TypeAlias = Mapping[str, float]
"""Values by the names in ``perf_model.prediction.hardware.QUANTITIES``."""

SLOWEST_IS_LARGEST = frozenset({"copy_latency_s"})
"""Quantities that are times; all others are rates."""


class Probe(Protocol):
    """One measurement of one or more quantities that can be repeated."""

    def repeat(self) -> Rates:
        """Run one repetition, time it, and return the values."""

    def verify(self) -> None:
        """Raise ``ProbeError`` if the repetitions did not compute or copy correctly."""


@dataclass(frozen=True, kw_only=True)
class ProbeEffort:
    """The sizes and the number of repetitions of the probes.

    ``budget_s`` is the time for all repetitions of one probe; at least ``min_samples`` are run, even if this takes
    longer.
    ``update_numel`` and ``copy_bytes`` are the amounts that a rank updates and copies at a time; the probes use more if
    the caches could hold them. ``launch_numel`` is the number of parameters that one launch updates on the accelerator.
    It is large enough for the kernel to take far longer than the gap between two launches. ``matrix_size`` is the
    number of rows of a square matrix.
    """

    warm_ups: int
    min_samples: int
    max_samples: int
    budget_s: float
    update_numel: int
    launch_numel: int
    copy_bytes: int
    matrix_size: int

    def repetitions(self, one_s: float) -> int:
        """Return how many repetitions of ``one_s`` seconds to run."""
        return max(self.min_samples, min(self.max_samples, int(self.budget_s / max(one_s, 1e-9))))


QUICK = ProbeEffort(
    warm_ups=1,
    min_samples=3,
    max_samples=15,
    budget_s=0.15,
    update_numel=12_000_000,
    launch_numel=32_000_000,
    copy_bytes=32 * 2**20,
    matrix_size=MATMUL_SIZE,
)
FULL = ProbeEffort(
    warm_ups=3,
    min_samples=7,
    max_samples=50,
    budget_s=1.2,
    update_numel=32_000_000,
    launch_numel=64_000_000,
    copy_bytes=128 * 2**20,
    matrix_size=MATMUL_SIZE,
)


def sample(prepare: Callable[[], Probe], effort: ProbeEffort, ranks: Ranks) -> list[Rates]:
    """Return the values of the slowest rank for each repetition; the result is the same on all ranks.

    This is a collective. Each repetition starts on all ranks at the same time, so that they load shared resources as
    training does. Raise ``ProbeError`` on every rank if the probe fails on any rank.
    """
    probe = call_on_all_ranks(ranks, prepare)
    last_s = 0.0
    for _ in range(effort.warm_ups):
        start_s = time.perf_counter()
        call_on_all_ranks(ranks, probe.repeat)
        last_s = time.perf_counter() - start_s
    repetitions = effort.repetitions(max(ranks.gather(last_s)))
    samples = [_slowest(ranks.gather(call_on_all_ranks(ranks, probe.repeat))) for _ in range(repetitions)]
    call_on_all_ranks(ranks, probe.verify)
    return samples


def _slowest(rates_by_rank: list[Rates]) -> Rates:
    return {
        name: (max if name in SLOWEST_IS_LARGEST else min)(rates[name] for rates in rates_by_rank)
        for name in rates_by_rank[0]
    }
