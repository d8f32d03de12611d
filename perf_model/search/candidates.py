"""Plans that a search has simulated, and the choice of the best ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from perf_model.prediction.lane_queues import Integers
from perf_model.search.placed_ramps import PlanKey, key_of


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """A plan as an array of codes, with its exposed seconds and the seconds of its update."""

    codes: Integers
    num_slots: int
    seconds: tuple[float, float]

    @property
    def key(self) -> PlanKey:
        """Return a key that is equal for equal plans."""
        return key_of((self.codes, self.num_slots))


def best_first(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return the candidates in the order of their exposed seconds, and of the seconds of their updates if equal."""
    return sorted(candidates, key=lambda candidate: candidate.seconds)


def best_by_slots(candidates: Iterable[Candidate], most: int) -> list[Candidate]:
    """Return the best candidates, at most ``most`` for each number of slots."""
    counts: Counter[int] = Counter()
    chosen = []
    for candidate in best_first(candidates):
        counts[candidate.num_slots] += 1
        if counts[candidate.num_slots] <= most:
            chosen.append(candidate)
    return chosen
