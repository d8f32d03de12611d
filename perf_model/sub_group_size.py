"""The ``sub_group_size`` to plan with: smaller ones overlap more finely, and pay a copy's latency more often."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from perf_model.budgets import Budgets, DoesNotFit
from perf_model.cost import CostModel
from perf_model.planner import PlannedUpdate, plan_updates
from perf_model.windows import Windows
from perf_model.workload import Workload

SUB_GROUP_SIZES = (
    5_000_000,
    10_000_000,
    20_000_000,
    50_000_000,
    100_000_000,
    200_000_000,
    500_000_000,
    1_000_000_000,
)
"""What is chosen from; DeepSpeed's default is the last."""

MOST_SUB_GROUPS = 1000
"""A size that makes more of them is not tried where a larger one fits: each costs a copy's latency seven times."""

ALIKE = 0.005
"""Exposed times as near as this are alike: smaller sub-groups gain nothing, for more rounding of pinned memory."""


def plan_sub_groups(
    workload_of: Callable[[int], Workload],
    sizes: Iterable[int],
    cost: CostModel,
    budgets: Budgets,
    windows: Windows,
    param_bytes: int,
) -> tuple[int, PlannedUpdate]:
    """The size, in parameters, and its plan that expose least; the largest of those that expose about as little.

    Raises ``DoesNotFit`` where no plan fits with any of them.
    """
    found: list[tuple[int, PlannedUpdate]] = []
    unfit: list[DoesNotFit] = []
    for size in sorted(sizes, reverse=True):
        workload = workload_of(size)
        if found and len(workload.sub_groups) > MOST_SUB_GROUPS:
            continue
        try:
            found.append((size, plan_updates(workload, cost, budgets, windows, param_bytes)))
        except DoesNotFit as error:
            unfit.append(error)
    if not found:
        raise min(unfit, key=lambda error: sum(error.missing.values()))
    enough_s = (1 + ALIKE) * min(planned.exposed_s for _, planned in found)
    return next(pair for pair in found if pair[1].exposed_s <= enough_s)
