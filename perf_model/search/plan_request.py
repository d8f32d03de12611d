"""Define ``PlanRequest``: all that a plan depends on, so that two programs that know the same find the same plan.

``deep-opt-states plan`` makes a request from a model's shape, a profile and the windows of a forecast. The training
engine makes one from its own parameters, the same profile and the windows that it measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from perf_model.prediction.cost import CostModel
from perf_model.prediction.memory import DEFAULT_SETUP, TrainingSetup, memory_of
from perf_model.prediction.overlap_windows import Windows
from perf_model.schedule.cutting import cut_into_units
from perf_model.schedule.happens_before import CHAINS
from perf_model.schedule.order import forward_order
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.rules import NO_RULES, PlacementRules
from perf_model.schedule.simple_placements import keep_fixed, place_all
from perf_model.schedule.uses import ParameterUses
from perf_model.schedule.workload import Partition, Workload
from perf_model.search.budgets import Budgets, DoesNotFit
from perf_model.search.planner import PlannedUpdate, evaluate, require_memory
from perf_model.search.unit_sizes import plan_units


@dataclass(frozen=True, kw_only=True)
class SizedPlan:
    """A plan with its prediction, and the size that its units were cut to."""

    unit_size: int
    planned: PlannedUpdate

    @property
    def plan(self) -> UpdatePlan:
        """Return the plan without the prediction."""
        return self.planned.plan

    def to_json_dict(self) -> dict[str, Any]:
        """Return the decisions of the planner, from which ``PlanRequest.restore`` forms the same plan on another rank.

        ``fingerprint`` also depends on the sub-groups, which every rank knows.
        """
        plan = self.plan
        return {
            "unit_size": self.unit_size,
            "num_slots": plan.num_slots,
            "placements": [placement.value for placement in plan.placements],
            "order": None if plan.order is None else list(plan.order),
            "fingerprint": plan.fingerprint,
        }


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """All that a plan depends on.

    ``sub_groups`` are one rank's partitions of the parameters, by sub-group and in DeepSpeed's order. ``rules`` place
    some of them, and the planner decides about the rest. ``unit_sizes`` are the sizes to choose from. ``setup`` has
    the facts that the memory depends on. ``uses`` has the names of the parameters in the order in which forward uses
    them, each as often as it does; None stands for the order of ``sub_groups``.
    """

    sub_groups: Sequence[Sequence[Partition]]
    unit_sizes: tuple[int, ...]
    cost: CostModel
    budgets: Budgets
    windows: Windows
    setup: TrainingSetup = DEFAULT_SETUP
    rules: PlacementRules = NO_RULES
    uses: Sequence[str] | None = None

    def workload(self, unit_size: int) -> Workload:
        """Return the units of at most ``unit_size`` parameters. No unit contains parameters of different rules."""
        return self._with_uses(cut_into_units(self.sub_groups, unit_size, self.rules.placement_of))

    @property
    def fixed_bytes(self) -> int:
        """Return the least accelerator memory of the units whose placement the rules fix."""
        return memory_of(_plan_of_rules(self.workload(min(self.unit_sizes))), self.setup).gpu_bytes

    def plan(self) -> SizedPlan:
        """Return the best plan over the unit sizes. Raise ``DoesNotFit`` if no plan fits.

        If gradients are accumulated in host memory, only units whose placement the rules fix are updated on the
        accelerator. For any others, the planner counts the sums of all gradients there.
        """
        if self.setup.accumulates and self.setup.sums_on_accelerator is False:
            return self._best_plan_of_rules()
        first_use_of = None if self.uses is None else self.first_use_of
        size, planned = plan_units(
            self.workload, self.unit_sizes, self.cost, self.budgets, self.windows, self.setup, first_use_of
        )
        return SizedPlan(unit_size=size, planned=planned)

    def _best_plan_of_rules(self) -> SizedPlan:
        found: list[SizedPlan] = []
        for size in sorted(self.unit_sizes, reverse=True):
            workload = self.workload(size)
            try:
                require_memory(workload, self.cost, self.budgets, self.setup)
            except DoesNotFit:
                if not found and size == min(self.unit_sizes):
                    raise
                continue
            plan = _plan_of_rules(workload)
            order = forward_order(workload, plan.placements, self.first_use_of(workload))
            found.append(SizedPlan(unit_size=size, planned=self.evaluate(replace(plan, order=order))))
        return min(found, key=lambda sized: sized.planned.exposed_s)

    def evaluate(self, plan: UpdatePlan) -> PlannedUpdate:
        """Return the prediction of ``plan``, which need not come from this request."""
        windows = replace(self.windows, first_use=self.first_use_of(plan.workload))
        plan = replace(plan, workload=self._with_uses(plan.workload))
        return evaluate(plan, self.cost, self.budgets, windows, self.setup)

    def restore(self, decisions: Mapping[str, Any]) -> UpdatePlan:
        """Return the plan with these ``decisions``, those of ``SizedPlan.to_json_dict``.

        Raise ``ValueError`` if it is another plan than the one that was planned, because the sub-groups differ.
        """
        plan = UpdatePlan(
            workload=self.workload(decisions["unit_size"]),
            placements=tuple(map(Placement, decisions["placements"])),
            num_slots=decisions["num_slots"],
            order=None if decisions["order"] is None else tuple(decisions["order"]),
        )
        if plan.fingerprint != decisions["fingerprint"]:
            raise ValueError(
                f"A plan is restored from the same sub-groups, found plan {plan.fingerprint} instead of "
                f"{decisions['fingerprint']}.\nUse the same model and config on every rank."
            )
        return plan

    def first_use_of(self, workload: Workload) -> tuple[int, ...] | None:
        """Return the units in the order in which forward first uses one of their parameters; None if that is not known.

        Units of parameters that forward does not use come last.
        """
        return None if self._uses is None else self._uses.first_use(workload)

    def _with_uses(self, workload: Workload) -> Workload:
        return workload if self._uses is None else self._uses.count(workload)

    @cached_property
    def _uses(self) -> ParameterUses | None:
        return None if self.uses is None else ParameterUses(self.sub_groups, self.uses)


def _plan_of_rules(workload: Workload) -> UpdatePlan:
    """Return the plan with the least accelerator memory: the CPU updates each unit whose placement is not fixed."""
    placements = keep_fixed(workload, place_all(workload, Placement.CPU))
    return UpdatePlan(workload=workload, placements=placements, num_slots=1)


def without_accelerator(cost: CostModel) -> CostModel:
    """Return ``cost`` of a rank on which nothing can be updated on an accelerator."""
    on_cpu = {kind: cost.per_param[kind] for kind in CHAINS[Placement.CPU]}
    return replace(cost, per_param=on_cpu)
