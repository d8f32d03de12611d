"""Test the predicted changes by single moves against plans that are evaluated one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from perf_model.prediction.cost import CostModel
from perf_model.prediction.memory import DEFAULT_SETUP as SETUP
from perf_model.prediction.memory import memory_of
from perf_model.prediction.overlap_windows import Windows
from perf_model.schedule.order import forward_order
from perf_model.schedule.placement import Placement
from perf_model.schedule.workload import Workload
from perf_model.search.budgets import Budgets
from perf_model.search.planner import evaluate, plan_updates
from perf_model.search.single_moves import changes_of_exposed_s
from tests.model.profiles import profile

WORKLOAD = Workload.from_numels([30_000_000] * 20)
COST = CostModel.from_profile(profile(), 2)
BUDGETS = Budgets(gpu_bytes=4 * 10**9)
MOVES = [(index, placement) for index in (0, 9, 19) for placement in Placement]


@pytest.mark.parametrize("windows", [Windows(), Windows(backward_s=0.1, forward_s=0.05)])
@pytest.mark.parametrize("order", [None, tuple(reversed(range(20)))])
def test_the_change_is_that_of_the_plan_with_the_unit_moved(windows: Windows, order: tuple[int, ...] | None) -> None:
    plan = replace(plan_updates(WORKLOAD, COST, BUDGETS, windows).plan, order=order)
    planned = evaluate(plan, COST, BUDGETS, windows, SETUP)
    changes_s = changes_of_exposed_s(planned, MOVES, COST, BUDGETS, windows, SETUP)
    assert list(changes_s) == MOVES
    expected = {}
    for index, placement in MOVES:
        placements = list(plan.placements)
        placements[index] = placement
        moved = replace(plan, placements=tuple(placements))
        fits = not BUDGETS.missing(memory_of(moved, SETUP))
        change_s = evaluate(moved, COST, BUDGETS, windows, SETUP).exposed_s - planned.exposed_s
        expected[index, placement] = pytest.approx(change_s, abs=1e-9) if fits else None
    assert changes_s == expected
    assert None in changes_s.values(), "not all moves fit"
    assert any(change_s is not None and change_s > 1e-4 for change_s in changes_s.values())


def test_a_moved_plan_is_in_the_order_that_follows_from_its_placements() -> None:
    windows = Windows(backward_s=0.1, forward_s=0.05, first_use=(*range(7, 20), *range(7)))
    planned = plan_updates(WORKLOAD, COST, BUDGETS, windows)
    changes_s = changes_of_exposed_s(planned, MOVES, COST, BUDGETS, windows, SETUP)
    for (index, placement), change_s in changes_s.items():
        placements = list(planned.plan.placements)
        placements[index] = placement
        order = forward_order(WORKLOAD, placements, windows.first_use)
        moved = replace(planned.plan, placements=tuple(placements), order=order)
        if change_s is not None:
            exposed_s = evaluate(moved, COST, BUDGETS, windows, SETUP).exposed_s
            assert change_s == pytest.approx(exposed_s - planned.exposed_s, abs=1e-9)
    others = [change_s for (index, placement), change_s in changes_s.items() if change_s]
    assert max(others) > 1e-4
    unmoved = [planned.plan.placements[index] is placement for index, placement in MOVES]
    assert [change_s for change_s, same in zip(changes_s.values(), unmoved, strict=True) if same] == pytest.approx(
        [0.0, 0.0, 0.0], abs=1e-9
    )


def test_no_moves_change_nothing() -> None:
    planned = plan_updates(WORKLOAD, COST, BUDGETS)
    assert changes_of_exposed_s(planned, [], COST, BUDGETS, Windows(), SETUP) == {}
