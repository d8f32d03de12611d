"""Count how units move while engines train: towards the accelerator, away from it, and to other borders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Range

TOWARDS_ACCELERATOR = (Placement.CPU, Placement.STREAMED, Placement.RESIDENT)
"""The placements by how much of the states is on the accelerator. A move to a later one is a promotion."""

PROMOTIONS = {
    f"{one.value} to {other.value}"
    for position, one in enumerate(TOWARDS_ACCELERATOR)
    for other in TOWARDS_ACCELERATOR[position + 1 :]
}
KINDS = {f"{one.value} to {other.value}" for one in Placement for other in Placement if one is not other}
"""The kinds of moves: from each placement to each other one."""


@dataclass
class MoveCounts:
    """The moves of one or more trainings on one rank.

    ``kinds`` counts units of new plans by the old and the new placement of their first element, if these differ.
    ``recut_plans`` counts new plans that cut sub-groups elsewhere than the plan before, and ``recut_units`` the units
    of them that have no unit of the same elements before. ``evictions`` and ``restorations`` count how often the memory
    of a plan was given back, and reserved again.
    """

    kinds: Counter[str] = field(default_factory=Counter)
    recut_plans: int = 0
    recut_units: int = 0
    evictions: int = 0
    restorations: int = 0

    def add(self, before: UpdatePlan, plan: UpdatePlan) -> None:
        """Count the moves from the plan ``before`` to ``plan``."""
        placed = _placements(before)
        for (first, *_), placement in _placements(plan).items():
            (old,) = (
                old
                for runs, old in placed.items()
                if any(run.sub_group == first.sub_group and run.begin <= first.begin < run.end for run in runs)
            )
            if old is not placement:
                self.kinds[f"{old.value} to {placement.value}"] += 1
        new_units = _placements(plan).keys() - placed.keys()
        self.recut_plans += bool(new_units)
        self.recut_units += len(new_units)

    @property
    def promotions(self) -> int:
        """Return the number of units that have moved towards the accelerator."""
        return sum(count for kind, count in self.kinds.items() if kind in PROMOTIONS)

    @property
    def demotions(self) -> int:
        """Return the number of units that have moved away from the accelerator."""
        return self.kinds.total() - self.promotions

    def to_json_dict(self) -> dict[str, Any]:
        """Return the counts as an answer of a rank."""
        return {**vars(self), "kinds": dict(self.kinds)}


def total(answers: Iterable[Mapping[str, Any]]) -> MoveCounts:
    """Return the sums of the answers of several trainings."""
    counts = MoveCounts()
    for answer in answers:
        counts.kinds.update(answer["kinds"])
        for name in vars(counts).keys() - {"kinds"}:
            setattr(counts, name, getattr(counts, name) + answer[name])
    return counts


def assert_many_moves(counts: MoveCounts, *, least: int = 1000, recut_plans: int = 50) -> None:
    """Check that at least ``least`` units have moved, many of them in each direction, and in every kind of move."""
    assert set(counts.kinds) == KINDS
    assert counts.promotions + counts.demotions >= least, counts
    assert min(counts.promotions, counts.demotions) >= least // 4, counts
    assert counts.recut_plans >= recut_plans, counts
    assert counts.recut_units >= least // 4, counts
    assert min(counts.evictions, counts.restorations) >= max(1, recut_plans // 10), counts


def _placements(plan: UpdatePlan) -> dict[tuple[Range, ...], Placement]:
    placed = zip(plan.workload.units, plan.placements, strict=True)
    return {unit.ranges: placement for unit, placement in placed if not unit.is_persistent}
