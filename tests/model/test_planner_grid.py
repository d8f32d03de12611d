"""A sample of what ``benchmarks/planner.py`` reports of the whole grid."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest

from benchmarks import record
from benchmarks.planner import Judged, excess_over_every_plan, judge, main
from benchmarks.synthetic import CORES, LINKS, RANKS_PER_NODE, SHAPES, machines

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


def test_the_script_records_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    assert main(["--machines", "2", "--timed", "1", "--exhaustive", "0", "--seed", "3"]) == 0
    (row,) = map(json.loads, (tmp_path / "planner.jsonl").read_text().splitlines())
    assert {"date", "commit", "cpu", "cores", "versions"} < set(row)
    assert (row["machines"], row["seed"], row["beat_the_bound"]) == (2, 3, 0)
    assert 1 <= row["ratio_to_bound_with_fill_and_drain"]["median"] <= row["ratio_to_work_bound"]["max"]
    assert "The ten plans that are farthest from it" in capsys.readouterr().out
