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
    """
    moved = {move: _apply(planned.plan, move) for move in moves}
    fitting = {move: plan for move, plan in moved.items() if not budgets.missing(memory_of(plan, setup))}
    exposed_s = _exposed_s(list(fitting.values()), cost, windows)
    changes_s = [seconds - planned.exposed_s for seconds in exposed_s]
    return dict.fromkeys(moves) | dict(zip(fitting, changes_s, strict=True))


def _apply(plan: UpdatePlan, move: SingleMove) -> UpdatePlan:
    index, placement = move
    return replace(plan, placements=(*plan.placements[:index], placement, *plan.placements[index + 1 :]))


def _exposed_s(plans: Sequence[UpdatePlan], cost: CostModel, windows: Windows) -> list[float]:
    """Return the exposed seconds of plans of one workload with the same order."""
    if not plans:
        return []
    workload = plans[0].workload
    if cost.blocks or plans[0].order is not None or windows.first_use is not None:
        simulator = Simulator(cost, windows)
        return [windows.exposed_s(simulator.run(plan.schedule, workload), workload) for plan in plans]
    slots = np.array([plan.num_slots for plan in plans])
    many = ManySimulator(workload, cost, windows)
    return [float(exposed_s) for exposed_s in many.run(encode([plan.placements for plan in plans]), slots).exposed_s]
