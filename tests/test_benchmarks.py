"""The benchmarks run where there is no GPU, say what they waive, and every exact arm has stock's bits."""

from __future__ import annotations

import importlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.aims import AIMS
from benchmarks.harness.picture import draw
from benchmarks.harness.report import last_runs, render
from benchmarks.harness.rows import RESULTS, Results, Row, read, told
from benchmarks.harness.suite import BENCHMARKS
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


def page_of(folder: Path) -> str:
    return render(last_runs(folder))


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
    "name",
    ["adam", "training_step", "ablation", "trace", "exactness", "model_error", "overhead", "planner", "scaling"],
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
    assert told(first) == ("300 ms", "200 ms to 400 ms")
    assert "failed" not in said


def test_a_claim_that_does_not_hold_has_failed() -> None:
    assert Row(arm="ours", quantity="stock's bits", said=False, claimed=True).to_json()["failed"] is True
    assert "failed" not in Row(arm="ZenFlow", quantity="stock's bits", said=False).to_json()


def test_every_number_of_the_page_is_of_a_row(results: Path) -> None:
    page = page_of(results)
    assert "threads 2:\n\n| arm | update | stock's bits |\n" in page
    assert "| ours | 300 ms (200 ms to 400 ms) | yes |" in page
    assert "- Waived, no GPU | none: GPU" in page
    for name in BENCHMARKS:
        assert f"## {name}: " in page
        assert (f"**Unmeasured**: `python -m benchmarks {name}`" in page) == (name != "adam")


@pytest.mark.parametrize(("median", "said"), [(1.7, "| holds |"), (1.5, "| **falls short** |")])
def test_aims_are_judged_by_the_rows(median: float, said: str, tmp_path: Path) -> None:
    arm = "ours, all on the CPU"
    results = Results("update_phase", tmp_path, quick=False)
    results.add(Row(arm="stock", quantity="updates faster than stock", unit="times", samples=[1.0]))
    results.add(Row(arm=arm, quantity="updates faster than stock", unit="times", samples=[median, 9.0, 0.1]))
    page = page_of(tmp_path)
    (line,) = (line for line in page.splitlines() if "1.6 times as fast" in line)
    # A machine with a GPU answers other questions.
    assert (said in line) == (results.rows[0]["gpu"] is None)
    assert page.count("**unmeasured**") == len(AIMS) - (results.rows[0]["gpu"] is None)


def test_the_farthest_setting_counts(tmp_path: Path) -> None:
    results = Results("model_error", tmp_path, quick=False)
    results.rows = []
    for size, error in ((1, 0.02), (4, -0.3), (8, 0.2)):
        setting = {"sub_group_size": size}
        row = Row(arm="planned", quantity="error of the prediction", unit="share", samples=[error], setting=setting)
        results.add(row)
    (aim,) = (its for its in AIMS if its.quantity == "error of the prediction")
    verdict = replace(aim, on_gpu=results.rows[0]["gpu"] is not None).judge(results.rows)
    assert verdict is not None
    assert (verdict.holds, str(verdict)) == (False, "-30%, the farthest of 3")
    assert aim.judge([]) is None


def test_the_page_that_is_committed_is_of_the_rows_that_are() -> None:
    assert (RESULTS.parent / "RESULTS.md").read_text() == page_of(RESULTS), "python -m benchmarks report"


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.jsonl")), ids=lambda path: path.stem)
def test_rows_can_be_drawn(path: Path, tmp_path: Path) -> None:
    last = read(path)[-1]["date"]
    rows = [row for row in read(path) if row["date"] == last]
    picture = importlib.import_module(f"benchmarks.{path.stem}").PICTURE
    drawn = draw(rows, tmp_path, picture)
    assert drawn.read_bytes().startswith(b"\x89PNG")
    assert drawn.stat().st_size > 10_000, "not an empty figure"


def test_a_trace_is_kept_beside_the_rows(tmp_path: Path) -> None:
    results = Results("trace", tmp_path, quick=False)
    results.add(Row(arm="ours, all on the CPU", quantity="trace", trace=b"compressed"))
    assert (tmp_path / "trace-ours-all-on-the-cpu.json.gz").read_bytes() == b"compressed"
    name = results.rows[0]["said"]
    assert f"[{name}](results/{name})" in page_of(tmp_path)


def test_quick_runs_measure_nothing_and_the_last_run_counts(results: Path) -> None:
    path = results / "adam.jsonl"
    last = {**json.loads(path.read_text().splitlines()[0]), "date": "2999-01-01T00:00:00+00:00", "median": 0.7}
    quick = {**last, "date": "2999-02-01T00:00:00+00:00", "quick": True, "median": 0.9}
    path.write_text(path.read_text() + json.dumps(last) + "\n" + json.dumps(quick) + "\n")
    page = page_of(results)
    assert re.findall(r"\| ours \| (\d+) ms", page) == ["700"]
