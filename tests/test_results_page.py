"""Check how rows are stored, drawn, compared with the targets and shown on the page of results."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest

from benchmarks.harness.charts import draw
from benchmarks.harness.results_page import last_runs, render
from benchmarks.harness.rows import (
    BENCHMARKS,
    COMPLETE,
    EMULATED,
    RESULTS,
    SIMULATED,
    Results,
    Row,
    format_row,
    read_rows,
)
from benchmarks.harness.targets import (
    BIT_IDENTICAL,
    COST_SHARE,
    ITERATION_SPEEDUP,
    MEMORY_BOUND_SPEEDUP,
    RETAINED,
    SAME_BITS,
    TARGETS,
    UPDATE_SPEEDUP,
)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Return a folder with the rows of one complete run of ``adam``: a time, a claim and a waiver."""
    results = Results("adam", tmp_path, quick=False)
    samples = (0.2, 0.1, 0.3, 0.4, 0.5)
    results.add(Row(variant="ours", quantity="update", unit="s", samples=samples, setting={"threads": 2}))
    results.add(
        Row(variant="ours", quantity="bit-identical to stock", value=True, claimed=True, setting={"threads": 2})
    )
    results.add(Row(variant="GPU", quantity="update", waived="no GPU | none"))
    results.finish()
    return tmp_path


def page_of(folder: Path) -> str:
    """Return the page that shows the rows of ``folder``."""
    return render(last_runs(folder))


@pytest.mark.parametrize(
    ("quantities", "how"),
    [
        (["exposed"], "Measured"),
        ([f"{SIMULATED} exposed", "planning time (CPU)"], "Measured and SIMULATED"),
        ([f"exposed ({EMULATED})", f"{SIMULATED} exposed"], "EMULATED and SIMULATED"),
    ],
)
def test_a_run_is_headed_by_how_each_of_its_quantities_was_made(
    quantities: list[str], how: str, tmp_path: Path
) -> None:
    results = Results("slots", tmp_path, quick=False)
    for quantity in quantities:
        results.add(Row(variant="ours", quantity=quantity, unit="s", samples=[1.0]))
    assert f"\n{how} on " in page_of(tmp_path)


def test_rows_have_machine_date_and_spread(results: Path) -> None:
    first, claim, waived, _ = read_rows(results / "adam.jsonl")
    assert {"date", "commit", "cpu", "cores", "gpu", "versions", "benchmark", "quick"} < first.keys()
    assert (first["median"], first["p20"], first["p80"], first["samples"]) == (0.3, 0.2, 0.4, 5)
    assert (first["unit"], first["setting"], claim["value"], waived["waived"]) == (
        "s",
        {"threads": 2},
        True,
        "no GPU | none",
    )
    assert format_row(first) == ("300 ms", "200 ms to 400 ms")
    assert "failed" not in claim


def test_new_rows_have_the_keys_of_the_committed_rows(results: Path) -> None:
    """Check that new and committed rows can be read from one file."""
    first, *_ = map(json.loads, (results / "adam.jsonl").read_text().splitlines())
    committed = json.loads((RESULTS / "overhead.jsonl").read_text().splitlines()[0])
    assert first.keys() >= committed.keys()


def test_claim_that_does_not_hold_is_marked_as_failed() -> None:
    claim = Row(variant="ours", quantity="bit-identical to stock", value=False, claimed=True)
    assert claim.as_dict()["failed"] is True
    assert "failed" not in Row(variant="ZenFlow", quantity="bit-identical to stock", value=False).as_dict()


def test_every_number_of_the_page_comes_from_a_row(results: Path) -> None:
    page = page_of(results)
    assert "Setting of all rows: threads 2\n\n| variant | update | bit-identical to stock |\n" in page
    assert "| ours | 300 ms (200 ms to 400 ms) | yes |" in page
    assert "- Waived (no GPU | none): GPU" in page
    for name in BENCHMARKS:
        assert f"## {name}: " in page
        assert (f"**Not measured**: run `python -m benchmarks {name}`" in page) == (name != "adam")


@pytest.mark.parametrize(
    ("cores", "median", "status"),
    [(2, 1.7, "| met |"), (2, 1.5, "| **missed** |"), (64, 1.5, "| **not measured** |")],
)
def test_targets_are_checked_against_the_rows(cores: int, median: float, status: str, tmp_path: Path) -> None:
    all_cpu = "ours, all on the CPU"
    results = Results("update_phase", tmp_path, quick=False)
    setting = {"sub_group_size": 10_000_000}
    for name, samples in (("stock", [1.0]), (all_cpu, [median, 9.0, 0.1])):
        results.add(Row(variant=name, quantity=UPDATE_SPEEDUP, unit="times", samples=samples, setting=setting))
    for size, most in ((1, 9.0), (10_000_000, 1.42)):
        labels = {"variant": all_cpu, "setting": {"sub_group_size": size}}
        results.add(Row(quantity=MEMORY_BOUND_SPEEDUP, unit="times", samples=[most], **labels))
    # The target is only for machines with 2 cores and no GPU.
    rows = [{**row, "cores": cores, "gpu": None} for row in results.rows]
    results.path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    page = page_of(tmp_path)
    (line,) = (line for line in page.splitlines() if "1.55 times as fast" in line)
    assert status in line
    assert ("speedup if memory-bound: 1.42x" in line) == ("missed" in status)
    assert page.count("**not measured**") == len(TARGETS) - (cores == 2)


def test_the_page_begins_with_the_speed_ups_of_each_model(tmp_path: Path) -> None:
    """Check measured ratios, or those of the medians. Settings that differ in their sub-groups alone are one line."""
    for name, machine, iteration, plugin in (
        ("training_step", {}, "iteration", "ours"),
        (
            "emulated",
            {"machine": "EMULATED a100-pcie4, 4 GPUs", "model": "7B"},
            "EMULATED iteration",
            "planned, overlap",
        ),
    ):
        results = Results(name, tmp_path, quick=False)
        for sub_group_size in (10, 20):
            setting = {**machine, "parameters": 5_000_000, "micro_batch": 1, "sub_group_size": sub_group_size}
            for variant, seconds in (("stock", 3.0), (plugin, 2.0), ("another", 1.0)):
                results.add(Row(variant=variant, quantity=iteration, unit="s", samples=[seconds], setting=setting))
            if not machine:
                ratios = Row(
                    variant=plugin, quantity=ITERATION_SPEEDUP, unit="times", samples=[1.4, 1.6, 1.8], setting=setting
                )
                results.add(ratios)
                results.add(Row(variant=plugin, quantity=BIT_IDENTICAL, value=True, setting=setting))
                for quantity, share in ((COST_SHARE, 0.25), (RETAINED, 0.8)):
                    results.add(Row(variant=plugin, quantity=quantity, unit="share", samples=[share], setting=setting))
        results.finish()
    top, _ = page_of(tmp_path).split("## Aims")
    measured, emulated = (line for line in top.splitlines() if line.startswith(("| measured", "| EMULATED")))
    assert measured.startswith("| measured on the CPU |")
    assert measured.endswith("| 5 M parameters | 1 | 3.00 s | 2.00 s | 1.6x (1.4x to 1.8x) | 25% | 80% | yes |")
    setting, missing = "| EMULATED | a100-pcie4, 4 GPUs | 7B | 1 |", "not measured | not measured | not compared |"
    assert emulated == f"{setting} 3.00 s | 2.00 s | 1.5x | {missing}"
    assert "As measured on the CPU, an iteration is 1.60 times as fast as with stock DeepSpeed, in one setting." in top
    assert "On EMULATED GPUs, an iteration is 1.50 times as fast as with stock DeepSpeed, in one setting." in top


def test_only_the_first_table_of_a_benchmark_is_shown_and_only_if_it_is_short(tmp_path: Path) -> None:
    for name, lines in (("adam", 12), ("copy", 13)):
        results = Results(name, tmp_path, quick=False)
        for number in range(lines):
            results.add(Row(variant=f"variant {number}", quantity="time", unit="s", samples=[1.0]))
        results.add(Row(variant="another", quantity="time", unit="s", samples=[1.0], setting={"threads": 2}))
    page = page_of(tmp_path)
    adam, copy = (page.split(f"## {name}: ")[1].split("\n## ")[0] for name in ("adam", "copy"))
    assert re.findall("<summary>(.*)</summary>", adam) == ["1 line"]
    assert re.findall("<summary>(.*)</summary>", copy) == ["13 lines", "1 line"]


def test_target_is_checked_against_its_worst_setting(tmp_path: Path) -> None:
    results = Results("model_error", tmp_path, quick=False)
    results.rows = []
    for size, error in ((1, 0.02), (4, -0.3), (8, 0.2)):
        setting = {"sub_group_size": size}
        row = Row(variant="planned", quantity="prediction error", unit="share", samples=[error], setting=setting)
        results.add(row)
    (target,) = (target for target in TARGETS if target.quantity == "prediction error")
    verdict = target.check([{**row, "gpu": "a GPU"} for row in results.rows])
    assert verdict is not None
    assert (verdict.is_met, str(verdict)) == (False, "-30%, the worst of 3 results (variant: planned)")
    assert target.check([]) is None


def test_committed_page_shows_the_committed_rows() -> None:
    assert (RESULTS.parent / "RESULTS.md").read_text() == page_of(RESULTS), "run python -m benchmarks report"


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.jsonl")), ids=lambda path: path.stem)
def test_committed_rows_can_be_drawn(path: Path, tmp_path: Path) -> None:
    chart = importlib.import_module(f"benchmarks.{path.stem}").CHART
    for rows in last_runs(RESULTS)[path.stem]:
        drawn = draw(rows, tmp_path, chart)
        if drawn is None:
            assert any("waived" in row for row in rows)
            continue
        assert f"![{path.stem}](results/{drawn.name})" in page_of(RESULTS)
        assert drawn.read_bytes().startswith(b"\x89PNG")
        assert drawn.stat().st_size > 10_000, "not an empty figure"


def test_trace_is_written_next_to_the_rows(tmp_path: Path) -> None:
    results = Results("trace", tmp_path, quick=False)
    results.add(Row(variant="ours, all on the CPU", quantity="trace", trace=b"compressed"))
    name = results.rows[0]["value"]
    assert name.startswith("trace-")
    assert name.endswith("-ours-all-on-the-cpu.json.gz")
    assert (tmp_path / name).read_bytes() == b"compressed"
    assert f"[trace](results/{name})" in page_of(tmp_path)


def test_stopped_run_does_not_replace_a_complete_run(results: Path) -> None:
    path = results / "adam.jsonl"
    stopped = {**json.loads(path.read_text().splitlines()[0]), "date": "2999-01-01T00:00:00+00:00", "median": 0.7}
    path.write_text(path.read_text() + json.dumps(stopped) + "\n")
    assert "| ours | 300 ms" in page_of(results)
    path.write_text(json.dumps(stopped) + "\n")
    assert "| ours | 700 ms" in page_of(results)


def test_last_measurement_counts_if_a_run_measures_twice(tmp_path: Path) -> None:
    results = Results("adam", tmp_path, quick=False)
    for seconds in (0.3, 0.4):
        results.add(Row(variant="ours", quantity="update", unit="s", samples=[seconds]))
    page = page_of(tmp_path)
    assert "| ours | 400 ms |" in page
    assert "300 ms" not in page


UNMEASURED = {"GPU, micro-batch 8: cost of the update at most 10 % of stock's"}
"""The targets whose quantities are newer than the last complete run of their benchmarks, which must measure them."""


def test_every_target_names_a_quantity_that_its_benchmark_measures() -> None:
    """Check against rows of the CPU, since rows of all benchmarks are committed: rows of a GPU differ in sizes only."""
    rows = [row for runs in last_runs(RESULTS).values() for run in runs[-1:] for row in run]
    moved = {on_gpu: [{**row, "gpu": "a GPU" if on_gpu else None} for row in rows] for on_gpu in (True, False)}
    unmeasured = {target.description for target in TARGETS if target.check(moved[target.on_gpu]) is None}
    assert unmeasured == UNMEASURED


def test_an_aim_for_the_bits_is_missed_if_one_variant_differs_from_stock(tmp_path: Path) -> None:
    results = Results("adam", tmp_path, quick=False)
    for variant, same in (("ours", True), ("ours, all on the CPU", False), ("ZenFlow", False)):
        results.add(Row(variant=variant, quantity=BIT_IDENTICAL, value=same))
    rows = [{**row, "cores": 2, "gpu": None} for row in results.rows]
    verdict = SAME_BITS.check(rows)
    assert verdict is not None
    assert (verdict.is_met, str(verdict)) == (False, "no, the worst of 2 results (variant: ours, all on the CPU)")
    assert SAME_BITS.check([row for row in rows if row["variant"] == "ZenFlow"]) is None


def test_runs_on_gpus_come_first_and_all_later_ones_are_folded(tmp_path: Path) -> None:
    results = Results("adam", tmp_path, quick=False)
    results.add(Row(variant="ours", quantity="update", unit="s", samples=[1.0]))
    (row,) = results.rows
    machines = (
        {"cpu": "an old CPU", "date": "2026-01-01"},
        {"cpu": "a CPU", "date": "2026-01-02"},
        {"cpu": "a CPU", "gpu": "an old GPU", "date": "2026-01-03"},
        {"cpu": "a CPU", "gpu": "a GPU", "date": "2026-01-04"},
    )
    rows = [{**row, "gpu": None, "cores": 2, **machine} for machine in machines]
    results.path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    section = page_of(tmp_path).split("## adam: ")[1].split("\n## ")[0]
    found = re.findall("Measured on (.*) with 2 cores, (.*), at commit", section)
    assert found == [
        ("a GPU with a CPU", "2026-01-04"),
        ("an old GPU with a CPU", "2026-01-03"),
        ("a CPU", "2026-01-02"),
    ]
    assert re.findall("<summary>(.*)</summary>", section) == [
        "Measured on an old GPU with a CPU with 2 cores",
        "Measured on a CPU with 2 cores",
    ]


def test_page_shows_the_last_run_and_no_quick_run(results: Path) -> None:
    path = results / "adam.jsonl"
    last = {**json.loads(path.read_text().splitlines()[0]), "date": "2999-01-01T00:00:00+00:00", "median": 0.7}
    end = {**last, "quantity": COMPLETE, "value": True}
    quick = {**last, "date": "2999-02-01T00:00:00+00:00", "quick": True, "median": 0.9}
    path.write_text(path.read_text() + "".join(json.dumps(row) + "\n" for row in (last, end, quick)))
    page = page_of(results)
    assert re.findall(r"\| ours \| (\d+) ms", page) == ["700"]
