"""Define ``Spread``: some sub-groups are resident, and a fraction of the others is streamed, spread evenly."""

from __future__ import annotations

from dataclasses import dataclass

from perf_model.prediction.cost import CostModel
from perf_model.schedule.lowering import needed_slots
from perf_model.schedule.placement import Placement, place_by_fraction
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Workload
from perf_model.search.bounds import ResidentCapacity, work_bound


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A family of placements with the same residents, one for each fraction that is streamed.

    ``residents`` are indices of sub-groups. Of the other sub-groups, only those that are no longer than ``largest`` may
    be streamed, because that is the length of a slot.
    """

    workload: Workload
    residents: tuple[int, ...]
    largest: int

    @classmethod
    def from_plan(cls, plan: UpdatePlan) -> Spread:
        """Return the family of ``plan``. If the plan streams nothing, every sub-group may be streamed."""
        _, slot_numel = needed_slots(plan.workload, plan.placements, plan.num_slots)
        return cls(
            workload=plan.workload,
            residents=tuple(
                index for index, placement in enumerate(plan.placements) if placement is Placement.RESIDENT
            ),
            largest=slot_numel or max(sub_group.numel for sub_group in plan.workload.sub_groups),
        )

    @property
    def streamable(self) -> list[int]:
        """Return the indices of the sub-groups that may be streamed."""
        resident = set(self.residents)
        return [
            sub_group.index
            for sub_group in self.workload.sub_groups
            if sub_group.index not in resident and sub_group.numel <= self.largest
        ]

    def place(self, fraction: float) -> tuple[Placement, ...]:
        """Stream ``fraction`` of the parameters of the streamable sub-groups, and place the rest on the CPU."""
        streamable = self.streamable
        placements = [Placement.CPU] * len(self.workload.sub_groups)
        for index in self.residents:
            placements[index] = Placement.RESIDENT
        chosen = place_by_fraction(Workload.from_numels([self._numel(index) for index in streamable]), fraction)
        for index, placement in zip(streamable, chosen, strict=True):
            placements[index] = placement
        return tuple(placements)

    def balanced_fraction(self, cost: CostModel) -> float:
        """Return the fraction that streams as many parameters as the work bound does with these residents."""
        total = self.workload.numel
        capacity = ResidentCapacity.uniform(sum(map(self._numel, self.residents)) / total)
        streamable = sum(map(self._numel, self.streamable))
        streamed = work_bound(total, cost, capacity).shares.streamed * total
        return min(1.0, streamed / streamable) if streamable else 0.0

    def _numel(self, index: int) -> int:
        return self.workload.sub_groups[index].numel
