"""Arrange units in the order in which forward first uses them, so that the search knows only one order.

The search plans a workload whose units are in that order already, and the plan is then mapped back. For example,
forward uses the embedding, which is unit 2, first::

    units          layer 0   layer 1   embedding
    first use      (2, 0, 1)
    arranged       embedding layer 0   layer 1
    placements     resident  streamed  cpu          of the arranged units
    mapped back    streamed  cpu       resident     processed in the order 2, 0, 1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from perf_model.schedule.order import forward_order
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Workload


def arrange(workload: Workload, first_use: Sequence[int] | None) -> Workload:
    """Return ``workload`` with its units in the order ``first_use``; None is the order of the indices.

    Raise ``ValueError`` unless the order names each unit once.
    """
    if first_use is None:
        return workload
    if sorted(first_use) != list(range(len(workload.units))):
        raise ValueError(f"first_use names each of the {len(workload.units)} units once, found {tuple(first_use)}.")
    return Workload(tuple(replace(workload.units[index], index=position) for position, index in enumerate(first_use)))


def map_back(plan: UpdatePlan, workload: Workload, first_use: Sequence[int] | None) -> UpdatePlan:
    """Return the plan of ``workload`` that does what ``plan`` does for the arranged units."""
    if first_use is None:
        return plan
    placements = [Placement.CPU] * len(first_use)
    for position, index in enumerate(first_use):
        placements[index] = plan.placements[position]
    order = plan.order or forward_order(plan.workload, plan.placements)
    return UpdatePlan(
        workload=workload,
        placements=tuple(placements),
        num_slots=plan.num_slots,
        order=tuple(first_use[position] for position in order),
    )
