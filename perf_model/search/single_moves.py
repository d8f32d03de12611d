"""Predict by how much the exposed time of a plan changes if one unit has another placement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from perf_model.prediction.cost import CostModel
from perf_model.prediction.lane_queues import encode
from perf_model.prediction.memory import TrainingSetup, memory_of
from perf_model.prediction.overlap_windows import Windows
from perf_model.prediction.simulate import Simulator
from perf_model.prediction.simulate_many import ManySimulator
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.search.budgets import Budgets
from perf_model.search.planner import PlannedUpdate
from perf_model.search.use_order import arrange, map_back

SingleMove = tuple[int, Placement]
"""The index of a unit, and its other placement."""


def changes_of_exposed_s(
    planned: PlannedUpdate,
    moves: Sequence[SingleMove],
    cost: CostModel,
    budgets: Budgets,
    windows: Windows,
    setup: TrainingSetup,
) -> dict[SingleMove, float | None]:
    """Return the change of the exposed seconds with each of ``moves`` alone; None if the plan then exceeds a budget.

    The other arguments are those with which ``planned`` was found. Each placement must be one of ``cost.placements``.
    If the plan is in forward's order, which the planner derives from the placements, then so are the moved plans.
    """
    moved = {move: _apply(planned.plan, move) for move in moves}
    fitting = {move: plan for move, plan in moved.items() if not budgets.missing(memory_of(plan, setup))}
    many = not cost.blocks and planned.plan.order == _derived_order(planned.plan, windows.first_use)
    exposed_s = (_exposed_s_together if many else _exposed_s)(list(fitting.values()), cost, windows)
    changes_s = [seconds - planned.exposed_s for seconds in exposed_s]
    return dict.fromkeys(moves) | dict(zip(fitting, changes_s, strict=True))


def _apply(plan: UpdatePlan, move: SingleMove) -> UpdatePlan:
    index, placement = move
    return replace(plan, placements=(*plan.placements[:index], placement, *plan.placements[index + 1 :]))


def _derived_order(plan: UpdatePlan, first_use: Sequence[int] | None) -> tuple[int, ...] | None:
    """Return the order that the planner derives from the placements; None stands for that of the indices."""
    if first_use is None:
        return None
    placements = tuple(plan.placements[index] for index in first_use)
    in_order = UpdatePlan(workload=arrange(plan.workload, first_use), placements=placements, num_slots=plan.num_slots)
    return map_back(in_order, plan.workload, first_use).order


def _exposed_s(plans: Sequence[UpdatePlan], cost: CostModel, windows: Windows) -> list[float]:
    """Return the exposed seconds of plans, each with its own order."""
    simulator = Simulator(cost, windows)
    return [windows.exposed_s(simulator.run(plan.schedule, plan.workload), plan.workload, cost) for plan in plans]


def _exposed_s_together(plans: Sequence[UpdatePlan], cost: CostModel, windows: Windows) -> list[float]:
    """Return the exposed seconds of plans of one workload in the orders that the planner derives."""
    if not plans:
        return []
    workload, first_use = plans[0].workload, windows.first_use
    codes = encode([plan.placements for plan in plans])
    many = ManySimulator(arrange(workload, first_use), cost, replace(windows, first_use=None))
    times = many.run(codes if first_use is None else codes[:, first_use], np.array([plan.num_slots for plan in plans]))
    return [float(exposed_s) for exposed_s in times.exposed_s]
