"""``Spread``: some sub-groups resident, and a fraction of the others streamed, evenly spread between the rest."""

from __future__ import annotations

from dataclasses import dataclass

from perf_model.prediction.cost import CostModel
from perf_model.schedule.lowering import needed_slots
from perf_model.schedule.placement import Placement, place_by_fraction
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Workload
from perf_model.search.bounds import Room, work_bound


@dataclass(frozen=True, kw_only=True)
class Spread:
    """``residents`` are indices. Of the others, those up to the length of the ``largest`` may be streamed: no slot is
    longer."""

    workload: Workload
    residents: tuple[int, ...]
    largest: int

    @classmethod
    def of(cls, plan: UpdatePlan) -> Spread:
        """That of a plan; where it streams nothing, any sub-group may be."""
        _, slot_numel = needed_slots(plan.workload, plan.placements, plan.num_slots)
        return cls(
            workload=plan.workload,
            residents=tuple(index for index, its in enumerate(plan.placements) if its is Placement.RESIDENT),
            largest=slot_numel or max(sub_group.numel for sub_group in plan.workload.sub_groups),
        )

    @property
    def streamable(self) -> list[int]:
        resident = set(self.residents)
        return [
            its.index for its in self.workload.sub_groups if its.index not in resident and its.numel <= self.largest
        ]

    def place(self, fraction: float) -> tuple[Placement, ...]:
        """``fraction``: of the parameters of those that may be streamed."""
        streamable = self.streamable
        placements = [Placement.CPU] * len(self.workload.sub_groups)
        for index in self.residents:
            placements[index] = Placement.RESIDENT
        chosen = place_by_fraction(Workload.of([self._numel(index) for index in streamable]), fraction)
        for index, its in zip(streamable, chosen, strict=True):
            placements[index] = its
        return tuple(placements)

    def balanced_fraction(self, cost: CostModel) -> float:
        """The fraction with which as many parameters are streamed as the lower bound has beside these residents."""
        total = self.workload.numel
        resident = Room.same(sum(map(self._numel, self.residents)) / total)
        streamable = sum(map(self._numel, self.streamable))
        streamed = work_bound(total, cost, resident).mix.streamed * total
        return min(1.0, streamed / streamable) if streamable else 0.0

    def _numel(self, index: int) -> int:
        return self.workload.sub_groups[index].numel
