"""Define ``Spread``: some units are resident, and a fraction of the others is streamed, spread evenly."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from perf_model.prediction.cost import CostModel
from perf_model.schedule.lowering import needed_slots
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.simple_placements import keep_fixed, place_by_fraction
from perf_model.schedule.workload import Workload
from perf_model.search.bounds import work_bound
from perf_model.search.capacity import ResidentCapacity


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A family of placements with the same residents, one for each fraction that is streamed.

    ``residents`` are indices of units. Of the other units, only those that are no longer than ``largest`` may
    be streamed, because that is the length of a slot. Units whose placement is fixed keep it.
    """

    workload: Workload = field(compare=False)
    residents: tuple[int, ...]
    largest: int

    @classmethod
    def from_plan(cls, plan: UpdatePlan) -> Spread:
        """Return the family of ``plan``. If the plan streams nothing, every unit may be streamed."""
        _, slot_numel = needed_slots(plan.workload, plan.placements, plan.num_slots)
        return cls(
            workload=plan.workload,
            residents=tuple(
                index for index, placement in enumerate(plan.placements) if placement is Placement.RESIDENT
            ),
            largest=slot_numel or max(unit.numel for unit in plan.workload.units),
        )

    @cached_property
    def streamable(self) -> list[int]:
        """Return the indices of the units that may be streamed."""
        resident = set(self.residents)
        return [
            unit.index
            for unit in self.workload.units
            if unit.fixed is None and unit.index not in resident and unit.numel <= self.largest
        ]

    def place(self, fraction: float) -> tuple[Placement, ...]:
        """Stream ``fraction`` of the parameters of the streamable units, and place the rest on the CPU."""
        streamable = self.streamable
        placements = [Placement.CPU] * len(self.workload.units)
        for index in self.residents:
            placements[index] = Placement.RESIDENT
        chosen = place_by_fraction(Workload(tuple(self.workload.units[index] for index in streamable)), fraction)
        for index, placement in zip(streamable, chosen, strict=True):
            placements[index] = placement
        return keep_fixed(self.workload, tuple(placements))

    def balanced_fraction(self, cost: CostModel) -> float:
        """Return the fraction that streams as many parameters as the work bound does with these residents."""
        total = self.workload.numel
        capacity = ResidentCapacity.uniform(sum(map(self._numel, self.residents)) / total)
        streamable = sum(map(self._numel, self.streamable))
        streamed = work_bound(total, cost, capacity).shares.streamed * total
        return min(1.0, streamed / streamable) if streamable else 0.0

    def _numel(self, index: int) -> int:
        return self.workload.units[index].numel
