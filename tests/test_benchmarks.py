"""The benchmarks run where there is no GPU, say what they waive, and every exact arm has stock's bits."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report import render
from benchmarks.rows import Results, Row, told
from benchmarks.suite import BENCHMARKS
from tests.launch import run_ranks
from tests.tiers import thorough

UPDATE = ("update", "update exposed")


@pytest.fixture
def results(tmp_path: Path) -> Path:
    results = Results("adam", tmp_path, quick=False)
    results.add(Row(arm="ours", quantity="update", unit="s", samples=(0.2, 0.1, 0.3, 0.4, 0.5), setting={"threads": 2}))
    results.add(Row(arm="ours", quantity="stock's bits", said=True, claimed=True, setting={"threads": 2}))
    results.add(Row(arm="GPU", quantity="update", waived="no GPU | none"))
    return tmp_path


def quickly(name: str, folder: Path) -> list[dict[str, Any]]:
    """Its rows."""
    arguments = ["-m", "benchmarks", name, "--quick", "--output", str(folder)]
    (finished,) = run_ranks(1, arguments, timeout_s=250)
    assert finished.returncode == 0, finished.output[-4000:]
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", [thorough("update_phase"), "overlap"])
def test_every_exact_arm_has_the_bits_of_stock(name: str, tmp_path: Path) -> None:
    rows = quickly(name, tmp_path)
    bits = {row["arm"]: row["said"] for row in rows if row["quantity"] == "stock's bits"}
    seconds = {row["arm"]: row["median"] for row in rows if row["quantity"] in UPDATE and "median" in row}
    assert len(bits) >= 5
    assert bits.keys() <= seconds.keys()
    assert all(value > 0 for value in seconds.values())
    assert {arm for arm, same in bits.items() if not same} <= {"Twin-Flow", "stock, cores bound"}
    classes = {row["arm"]: row["said"].split()[0] for row in rows if row["quantity"] == "is"}
    assert classes.keys() == bits.keys()
    assert classes["stock"] == "DeepSpeedZeroOptimizer_Stage3"
    waived = {row["arm"]: row["waived"] for row in rows if "waived" in row}
    if name == "update_phase":
        assert set(waived) == {"SuperOffload", "SuperOffload, no clipping", "ZenFlow (approximate)"}
        assert set(waived.values()) == {"runs on CUDA only, says DeepSpeed 0.19.8"}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", ["adam", "training_step", "exactness", "model_error", "overhead", "planner", "scaling"]
)
def test_it_runs(name: str, tmp_path: Path) -> None:
    rows = quickly(name, tmp_path)
    assert any("median" in row for row in rows)
    assert not [row for row in rows if row.get("failed")]


def test_rows_say_where_and_when_and_the_spread(results: Path) -> None:
    first, said, waived = map(json.loads, (results / "adam.jsonl").read_text().splitlines())
    assert {"date", "commit", "cpu", "cores", "gpu", "versions", "benchmark", "quick"} < first.keys()
    assert (first["median"], first["p20"], first["p80"], first["samples"]) == (0.3, 0.2, 0.4, 5)
    assert (first["unit"], first["setting"], said["said"], waived["waived"]) == (
        "s",
        {"threads": 2},
        True,
        "no GPU | none",
    )
    assert told(first) == ("300", "200 to 400", "ms")
    assert "failed" not in said


def test_a_claim_that_does_not_hold_has_failed() -> None:
    assert Row(arm="ours", quantity="stock's bits", said=False, claimed=True).to_json()["failed"] is True
    assert "failed" not in Row(arm="ZenFlow", quantity="stock's bits", said=False).to_json()


def test_every_number_of_the_page_is_of_a_row(results: Path) -> None:
    page = render(results)
    assert "| ours | update | 300 | 200 to 400 | ms |" in page
    assert "| ours | stock's bits | yes |  |  |" in page
    assert "no GPU \\| none" in page
    for name in BENCHMARKS:
        assert f"## {name}: " in page
        assert (f"**Unmeasured**: `python -m benchmarks {name}`" in page) == (name != "adam")


def test_quick_runs_measure_nothing_and_the_last_run_counts(results: Path) -> None:
    path = results / "adam.jsonl"
    last = {**json.loads(path.read_text().splitlines()[0]), "date": "2999-01-01T00:00:00+00:00", "median": 0.7}
    quick = {**last, "date": "2999-02-01T00:00:00+00:00", "quick": True, "median": 0.9}
    path.write_text(path.read_text() + json.dumps(last) + "\n" + json.dumps(quick) + "\n")
    page = render(results)
    assert re.findall(r"\| ours \| update \| (\d+)", page) == ["700"]
