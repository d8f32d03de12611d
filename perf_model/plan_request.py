"""Collect everything that a plan depends on, so that the command and every rank find the same plan."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from perf_model.planner import PlannedUpdate, evaluate, plan_units
from perf_model.prediction.cost import CostModel
from perf_model.prediction.memory import DEFAULT_SETUP, Budgets, TrainingSetup, memory_of
from perf_model.prediction.overlap_windows import Windows
from perf_model.schedule.cutting import DISK_UNIT_SIZE, cut_into_units
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan, least_plan
from perf_model.schedule.rules import NO_RULES, PlacementRules
from perf_model.schedule.uses import with_uses
from perf_model.schedule.workload import Partition, Workload
from perf_model.units import GB, gigabytes


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """Everything that a plan depends on.

    ``sub_groups`` contains one rank's partitions in DeepSpeed's order, which is the order of use, unless ``uses`` names
    the parameters once per use. With ``all_eager``, all units that may be eager are, whatever the gain.
    """

    sub_groups: Sequence[Sequence[Partition]]
    unit_sizes: tuple[int, ...]
    cost: CostModel
    budgets: Budgets
    windows: Windows
    setup: TrainingSetup = DEFAULT_SETUP
    rules: PlacementRules = NO_RULES
    uses: Sequence[str] | None = None
    all_eager: bool = False
    disk_unit_size: int = DISK_UNIT_SIZE

    def workload(self, unit_size: int) -> Workload:
        """Return the units of at most ``unit_size`` parameters, and ``disk_unit_size`` on disk."""
        units = cut_into_units(self.sub_groups, unit_size, self.rules.placement_of, self.disk_unit_size)
        return self._arranged(units)

    @property
    def fixed_bytes(self) -> int:
        """Return the least accelerator memory of the units whose placement the rules fix."""
        return memory_of(least_plan(self.workload(min(self.unit_sizes))), self.setup).gpu_bytes

    def plan(self) -> PlannedUpdate:
        """Return the best plan over the unit sizes. Raise ``DoesNotFit`` if no plan fits."""
        planned = plan_units(self.workload, self.unit_sizes, self.cost, self.budgets, self.windows, self.setup)
        if self.all_eager:
            eligible = self.setup.eligible_as_eager(planned.plan)
            all_eager = self.evaluate(replace(planned.plan, eager=eligible))
            if "gpu_bytes" in self.budgets.missing(all_eager.memory):
                # Streamed units that are eager take more memory of the accelerator.
                eligible = frozenset(unit for unit in eligible if planned.plan.placements[unit] is Placement.CPU)
                all_eager = self.evaluate(replace(planned.plan, eager=eligible))
            planned = replace(all_eager, unit_size=planned.unit_size)
        return planned

    def evaluate(self, plan: UpdatePlan) -> PlannedUpdate:
        plan = replace(plan, workload=self._arranged(plan.workload))
        return evaluate(plan, self.cost, self.windows, self.setup)

    def why_nothing_is_streamed(self, plan: UpdatePlan, unavailable: str = "") -> str:
        """Return the reason, ``unavailable`` if the accelerator cannot update; an empty text if a unit is streamed."""
        if Placement.STREAMED in plan.placements:
            return ""
        if unavailable:
            why = unavailable
        elif all(
            placement is Placement.RESIDENT or unit.is_persistent
            for unit, placement in zip(plan.workload.units, plan.placements, strict=True)
        ):
            why = "the states of all units fit into GPU memory, and stay there."
        elif all(unit.fixed is not None for unit in plan.workload.units):
            why = "rules give every unit another placement."
        elif Placement.STREAMED not in self.cost.placements:
            why = "the hardware profile has no rate of Adam on the GPU. Profile this machine again."
        elif (budget := self.budgets.gpu_bytes) is not None and budget < (needed := self._bytes_to_stream(plan)):
            why = (
                f"the budget of {gigabytes(budget)} of GPU memory cannot hold a slot and the gradients, "
                f'{gigabytes(needed)}. Set "gpu_memory_gb" to at least {math.ceil(10 * needed / GB) / 10:.1f}, '
                'lower "unit_size", or use more ranks.'
            )
        else:
            why = "no plan that streams is predicted to expose less time."
        return f"Nothing is streamed: {why}"

    def _bytes_to_stream(self, plan: UpdatePlan) -> int:
        """Return the least accelerator memory with which a unit can be streamed."""
        units, placements = plan.workload.units, list(least_plan(plan.workload).placements)
        shortest = min((unit for unit in units if unit.fixed is None), key=lambda unit: unit.numel)
        placements[shortest.index] = Placement.STREAMED
        streaming = UpdatePlan(workload=plan.workload, placements=tuple(placements), num_slots=1)
        return memory_of(streaming, self.setup).gpu_bytes

    def restore(self, decisions: Mapping[str, Any]) -> UpdatePlan:
        """Return the plan with these ``decisions``. Raise ``ValueError`` if the sub-groups differ."""
        plan = UpdatePlan(
            workload=self.workload(decisions["unit_size"]),
            placements=tuple(map(Placement, decisions["placements"])),
            num_slots=decisions["num_slots"],
            order=None if decisions["order"] is None else tuple(decisions["order"]),
            eager=frozenset(decisions["eager"]),
        )
        if plan.fingerprint != decisions["fingerprint"]:
            raise ValueError(
                f"A plan is restored from the same sub-groups, found plan {plan.fingerprint} instead of "
                f"{decisions['fingerprint']}.\nUse the same model and config on every rank."
            )
        return plan

    def _arranged(self, workload: Workload) -> Workload:
        return workload if self.uses is None else with_uses(workload, self.sub_groups, self.uses)
