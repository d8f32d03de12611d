"""A sample of what ``benchmarks/planner.py`` reports of the whole grid."""

from __future__ import annotations

from statistics import median

import pytest

from benchmarks.harness.synthetic import CORES, LINKS, RANKS_PER_NODE, SHAPES, machines
from benchmarks.planner import Judged, excess_over_every_plan, judge, of_machines

# One worker of pytest-xdist makes the fixture, once.
pytestmark = pytest.mark.xdist_group("planner grid")


@pytest.fixture(scope="module")
def judged() -> list[Judged]:
    return [judge(machine) for machine in machines(16, seed=7)]


def test_no_plan_beats_the_bound(judged: list[Judged]) -> None:
    assert min(its.ratio for its in judged) >= 1 - 1e-9
    assert all(its.ratio <= its.ratio_to_work for its in judged)


def test_half_of_the_plans_are_within_three_percent_of_it(judged: list[Judged]) -> None:
    assert median(its.ratio for its in judged) <= 1.03


def test_with_few_sub_groups_no_plan_is_better() -> None:
    small = (its for its in machines(400, seed=7) if its.shape.name == "1B" and its.ranks == 8 and its.resident == 0.1)
    excess = excess_over_every_plan(next(small))
    assert excess is not None
    assert excess <= 1e-9


def test_the_grid_is_as_wide_as_it_says() -> None:
    drawn = machines(540, seed=0)
    assert len(set(drawn)) == 540
    assert {its.link for its in drawn} == set(LINKS)
    assert {its.cores for its in drawn} == set(CORES)
    assert {its.ranks for its in drawn} == set(RANKS_PER_NODE)
    assert {its.shape for its in drawn} == set(SHAPES)


def test_the_benchmark_says_what_it_found() -> None:
    rows = {(row.arm, row.quantity): row for row in of_machines(2, timed=1, exhaustive=0, seed=3)}
    ratios = rows["plans", "update over the bound with fill and drain"].samples
    assert len(ratios) == 2
    assert min(ratios) >= 1 - 1e-9
    assert rows["plans", "none beats the bound"].said is True
    assert any(quantity == "planning, CPU time" for _, quantity in rows)
