"""Test the predicted changes by single moves against plans that are evaluated one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from perf_model.plan_request import PlanRequest
from perf_model.prediction.cost import CostModel
from perf_model.prediction.memory import Budgets, memory_of
from perf_model.prediction.overlap_windows import Windows
from perf_model.schedule.lowering import forward_order
from perf_model.schedule.placement import Placement
from perf_model.schedule.workload import Partition
from tests.model.profiles import profile

NAMES = [f"layers.{layer}.weight" for layer in range(20)]
REQUEST = PlanRequest(
    sub_groups=[[Partition(name, 30_000_000) for name in NAMES]],
    unit_sizes=(30_000_000,),
    cost=CostModel.from_profile(profile(), 2),
    budgets=Budgets(gpu_bytes=4 * 10**9),
    windows=Windows(backward_s=0.1, forward_s=0.05),
)
MOVES = [(index, placement) for index in (0, 9, 19) for placement in Placement]


@pytest.mark.parametrize("uses", [None, [*NAMES[7:], *NAMES[:7]]], ids=["in order", "in another order"])
def test_the_change_is_that_of_the_plan_with_the_unit_moved(uses: list[str] | None) -> None:
    request = replace(REQUEST, uses=uses)
    planned = request.plan().planned
    workload, first_use = planned.plan.workload, request.first_use_of(planned.plan.workload)
    assert len(workload.units) == 20
    changes_s = request.changes_of_exposed_s(planned, MOVES)
    assert list(changes_s) == MOVES
    expected = {}
    for index, placement in MOVES:
        placements = list(planned.plan.placements)
        placements[index] = placement
        order = None if first_use is None else forward_order(workload, placements, first_use)
        moved = replace(planned.plan, placements=tuple(placements), order=order)
        change_s = request.evaluate(moved).exposed_s - planned.exposed_s
        expected[index, placement] = None if request.budgets.missing(memory_of(moved)) else pytest.approx(change_s)
    assert changes_s == expected
    assert None in changes_s.values(), "not all moves fit"
    assert any(change_s is not None and change_s > 1e-4 for change_s in changes_s.values())
    unmoved = [changes_s[index, planned.plan.placements[index]] for index in (0, 9, 19)]
    assert unmoved == pytest.approx([0.0, 0.0, 0.0], abs=1e-9)


def test_no_moves_change_nothing() -> None:
    assert REQUEST.changes_of_exposed_s(REQUEST.plan().planned, []) == {}
