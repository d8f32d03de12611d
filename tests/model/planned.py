"""Plan for units of one size, which need not come from a model."""

from __future__ import annotations

from perf_model.planner import PlannedUpdate, plan_units
from perf_model.prediction.cost import CostModel
from perf_model.prediction.memory import DEFAULT_SETUP, Budgets, TrainingSetup
from perf_model.prediction.overlap_windows import Windows
from perf_model.schedule.workload import Workload

NO_WINDOWS = Windows()
UNLIMITED = Budgets()


def plan_updates(
    workload: Workload,
    cost: CostModel,
    budgets: Budgets = UNLIMITED,
    windows: Windows = NO_WINDOWS,
    setup: TrainingSetup = DEFAULT_SETUP,
) -> PlannedUpdate:
    """Return the plan for the units of ``workload``, which forward uses in the order of ``windows``."""
    _, planned = plan_units(lambda size: workload, [1], cost, budgets, windows, setup, lambda units: windows.first_use)
    return planned
