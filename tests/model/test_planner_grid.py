"""Check a sample of the grid that the benchmark ``planner`` measures as a whole."""

from __future__ import annotations

from statistics import median

import pytest

from benchmarks.planner import ROUNDING, PlanQuality, compare_with_bounds, excess_over_best_plan, rows_of_nodes
from benchmarks.planner.synthetic_nodes import CORES, LINKS, RANKS_PER_NODE, SHAPES, draw_nodes

# One worker of pytest-xdist makes the fixture, once.
pytestmark = pytest.mark.xdist_group("planner grid")


@pytest.fixture(scope="module")
def qualities() -> list[PlanQuality]:
    """Return how close the plans of 16 nodes are to their bounds."""
    return [compare_with_bounds(node) for node in draw_nodes(16, seed=7)]


@pytest.mark.thorough
def test_no_plan_beats_the_bound(qualities: list[PlanQuality]) -> None:
    assert min(quality.ratio for quality in qualities) >= 1 - 1e-9
    assert all(quality.ratio <= quality.ratio_to_work * (1 + ROUNDING) for quality in qualities)


@pytest.mark.thorough
def test_half_of_the_plans_are_within_three_percent_of_the_bound(qualities: list[PlanQuality]) -> None:
    assert median(quality.ratio for quality in qualities) <= 1.03


def test_no_plan_of_few_units_is_faster_than_the_chosen_one() -> None:
    nodes = draw_nodes(400, seed=7)
    small = (node for node in nodes if node.shape.name == "1B" and node.ranks == 8 and node.resident == 0.1)
    excess = excess_over_best_plan(next(small))
    assert excess is not None
    assert excess <= 1e-9


def test_drawn_nodes_cover_every_value_of_the_grid() -> None:
    drawn = draw_nodes(540, seed=0)
    assert len(set(drawn)) == 540
    assert {node.link for node in drawn} == set(LINKS)
    assert {node.cores for node in drawn} == set(CORES)
    assert {node.ranks for node in drawn} == set(RANKS_PER_NODE)
    assert {node.shape for node in drawn} == set(SHAPES)


def test_benchmark_reports_ratios_bounds_and_planning_times() -> None:
    rows = {(row.variant, row.quantity): row for row in rows_of_nodes(2, timed=1, exhaustive=0, seed=3)}
    ratios = rows["plans", "update / bound with fill and drain"].samples
    assert len(ratios) == 2
    assert min(ratios) >= 1 - 1e-9
    assert rows["plans", "no plan beats the bound"].value is True
    assert any(quantity == "planning time (CPU)" for _, quantity in rows)
