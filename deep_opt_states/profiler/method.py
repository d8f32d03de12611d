"""How anything is measured: warm-up, repetitions by all ranks at once, and a result that is verified."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from deep_opt_states.profiler.ranks import Ranks, agree

METHOD = 7
"""Raised when a probe comes to measure something else: profiles that were cached before are of no use then."""

Rates: TypeAlias = Mapping[str, float]
"""By the names in ``perf_model.prediction.hardware.QUANTITIES``."""

SLOWEST_IS_LARGEST = frozenset({"copy_latency_s"})
"""Quantities that are a time; all others are rates."""


class Probe(Protocol):
    def repeat(self) -> Rates:
        """One repetition, timed inside."""

    def verify(self) -> None:
        """Raises ``ProbeError`` if the repetitions did not do what they should have."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """``budget_s`` is for all repetitions of one probe; there are at least ``min_samples`` of them, however long.

    ``update_numel`` and ``copy_bytes`` are what a rank updates and copies at a time; more where caches could help.
    ``launch_numel`` is what one launch updates on the accelerator: so much that the kernel takes far longer than what
    lies between two launches. ``matrix_size`` is the number of rows of a square matrix.
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
        return max(self.min_samples, min(self.max_samples, int(self.budget_s / max(one_s, 1e-9))))


QUICK = Effort(
    warm_ups=1,
    min_samples=3,
    max_samples=15,
    budget_s=0.15,
    update_numel=12_000_000,
    launch_numel=32_000_000,
    copy_bytes=32 * 2**20,
    matrix_size=4096,
)
FULL = Effort(
    warm_ups=3,
    min_samples=7,
    max_samples=50,
    budget_s=1.2,
    update_numel=32_000_000,
    launch_numel=64_000_000,
    copy_bytes=128 * 2**20,
    matrix_size=8192,
)


def sample(prepare: Callable[[], Probe], effort: Effort, ranks: Ranks) -> list[Rates]:
    """One ``Rates`` a repetition, of the slowest rank; the same on all ranks. A collective.

    Each repetition starts on all ranks at once, so that they load what they share as in training. Raises
    ``ProbeError`` on every rank if the probe fails on any.
    """
    probe = agree(ranks, prepare)
    last_s = 0.0
    for _ in range(effort.warm_ups):
        start_s = time.perf_counter()
        agree(ranks, probe.repeat)
        last_s = time.perf_counter() - start_s
    repetitions = effort.repetitions(max(ranks.gather(last_s)))
    samples = [_slowest(ranks.gather(agree(ranks, probe.repeat))) for _ in range(repetitions)]
    agree(ranks, probe.verify)
    return samples


def _slowest(of_ranks: list[Rates]) -> Rates:
    return {
        name: (max if name in SLOWEST_IS_LARGEST else min)(rates[name] for rates in of_ranks) for name in of_ranks[0]
    }
