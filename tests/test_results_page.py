"""Check how rows are stored, compared with the aims, and shown on the page of results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.rows import (
    BENCHMARKS,
    BIT_IDENTICAL,
    COST_SHARE,
    EMULATED,
    ITERATION_SPEEDUP,
    RESULTS,
    RETAINED,
    Results,
    Row,
    format_row,
    last_rows,
    read_rows,
)
from benchmarks.report import AIMS, CHART, aim_lines, comparisons, report

MOST_BYTES, MOST_WORDS = 300_000, 800


def write(folder: Path, name: str, *rows: Row, **run: object) -> list[dict[str, Any]]:
    """Append the rows of one run whose description is changed by ``run``, and return all rows of the file."""
    path = folder / f"{name}.jsonl"
    before = path.read_text() if path.exists() else ""
    path.unlink(missing_ok=True)
    results = Results(name, folder, quick=False)
    for row in rows:
        results.add(row)
    first, *others = path.read_text().splitlines()
    described = {**json.loads(first)["run"], "gpu": None, "cores": 2, **run}
    path.write_text(before + "\n".join([json.dumps({"run": described}), *others]) + "\n")
    return read_rows(path)


def row(variant: str, quantity: str, *samples: float, **fields: Any) -> Row:
    return Row(variant=variant, quantity=quantity, samples=samples, **{"unit": "s", "setting": SETTING, **fields})


SETTING = {"parameters": 5_000_000, "micro_batch": 1, "sub_group_size": 10}


def training_rows(stock_s: float, ours_s: float, **setting: object) -> list[Row]:
    """Return rows of ``training_step`` for stock and ours."""
    labels = {"setting": {**SETTING, **setting}}
    return [
        row("stock", "iteration", stock_s, **labels),
        row("stock", RETAINED, 0.4, unit="share", **labels),
        row("ours", "iteration", ours_s, **labels),
        row("ours", ITERATION_SPEEDUP, 1.4, 1.6, 1.8, unit="times", **labels),
        row("ours", COST_SHARE, 0.25, unit="share", **labels),
        row("ours", RETAINED, 0.8, unit="share", **labels),
        row("ours", BIT_IDENTICAL, value=True, **labels),
        row("another", "iteration", 1.0, **labels),
    ]


def test_rows_have_machine_date_and_spread(tmp_path: Path) -> None:
    first, single, claim, waived = write(
        tmp_path,
        "adam",
        row("ours", "update", 0.2, 0.1, 0.3, 0.4, 0.5),
        row("ours", "update rate", 1234567.8, unit="parameters/s"),
        row("ours", BIT_IDENTICAL, value=True, claimed=True),
        row("GPU", "update", waived="no GPU", setting={}),
    )
    assert {"date", "commit", "cpu", "cores", "gpu", "versions", "benchmark", "quick"} < first.keys()
    assert (first["median"], first["p20"], first["p80"], first["samples"]) == (0.3, 0.2, 0.4, 5)
    assert (first["unit"], first["setting"], claim["value"], waived["waived"]) == ("s", SETTING, True, "no GPU")
    assert (single["median"], single["samples"], waived["setting"]) == (1234600.0, 1, {})
    assert format_row(first) == ("300 ms", "200 ms to 400 ms")
    assert "failed" not in claim


def test_every_line_is_one_row_and_the_samples_are_not_kept(tmp_path: Path) -> None:
    write(tmp_path, "adam", *(row("ours", f"quantity {number}", *range(99)) for number in range(5)))
    lines = [json.loads(line) for line in (tmp_path / "adam.jsonl").read_text().splitlines()]
    assert [*lines[0], *lines[1]] == ["run", "setting"]
    assert [line["quantity"] for line in lines[2:]] == [f"quantity {number}" for number in range(5)]
    assert all(isinstance(line["samples"], int) for line in lines[2:])


def test_claim_that_does_not_hold_is_marked_as_failed() -> None:
    claim = Row(variant="ours", quantity=BIT_IDENTICAL, value=False, claimed=True)
    assert claim.as_dict()["failed"] is True
    assert "failed" not in Row(variant="ZenFlow", quantity=BIT_IDENTICAL, value=False).as_dict()


def test_the_last_run_in_a_setting_on_a_kind_of_machine_counts_and_no_quick_run(tmp_path: Path) -> None:
    write(tmp_path, "adam", row("ours", "update", 1.0), row("stock", "update", 2.0), date="1", cpu="an old CPU")
    write(tmp_path, "adam", row("ours", "update", 0.3), row("ours", "update", 0.4), date="2")
    write(tmp_path, "adam", row("ours", "update", 5.0), date="3", gpu="a GPU")
    write(tmp_path, "adam", row("ours", "update", 6.0, setting={"threads": 2}), date="4")
    write(tmp_path, "adam", row("ours", "update", 7.0), date="5", quick=True)
    # Rows of two runs are never compared, and of a quantity that a run measured twice the later one counts.
    assert [found["median"] for found in last_rows(tmp_path)] == [0.4, 5.0, 6.0]


def test_the_page_shows_measured_rows_before_emulated_ones_which_say_so(tmp_path: Path) -> None:
    write(tmp_path, "training_step", *training_rows(3.0, 2.0))
    write(tmp_path, "training_step", *training_rows(4.0, 2.5), row("stock", "peak GPU memory", 5e9), gpu="NVIDIA H100")
    emulated = {"machine": f"{EMULATED} a100-pcie4, 4 GPUs", "model": "7B", "micro_batch": 1, "gpu_memory_share": 0.1}
    seconds = {"stock": 3.0, "planned, overlap": 2.0}
    write(tmp_path, "emulated", *(row(*arm, setting=emulated) for arm in iteration_of(seconds)))
    page = report(tmp_path)
    lines = [line for line in page.splitlines() if "|1.6" in line or "|1.5" in line]
    assert lines == [
        "|H100|5M/1|4|2.5|1.6 (1.4 to 1.8)|25|yes|40/80|-|",
        f"|{machine(tmp_path)}|5M/1|3|2|1.6 (1.4 to 1.8)|25|yes|40/80|-|",
        "|EMULATED|a100-pcie4 x4|7B/1|3|2|1.5|-|-|10%|",
    ]
    assert page.index("## Measured on GPUs") < page.index("## Measured without a GPU") < page.index("## EMULATED")
    assert "1.60 to 1.60 times as fast as with stock DeepSpeed on one GPU" in page
    assert (tmp_path / CHART).read_bytes().startswith(b"\x89PNG")


def iteration_of(seconds: dict[str, float]) -> list[tuple[str, str, float]]:
    return [(variant, f"{EMULATED} iteration", value) for variant, value in seconds.items()]


def machine(folder: Path) -> str:
    return f"{read_rows(folder / 'training_step.jsonl')[0]['cpu']}, 2 cores"


def test_settings_that_differ_in_their_sub_groups_alone_are_one_line(tmp_path: Path) -> None:
    write(tmp_path, "training_step", *training_rows(3.0, 2.0), *training_rows(5.0, 2.0, sub_group_size=20))
    (found,) = comparisons(last_rows(tmp_path))
    assert found.iterations[0]["median"] == 5.0


def test_bits_of_stock_that_differ_from_run_to_run_are_no_answer(tmp_path: Path) -> None:
    *rows, _ = training_rows(3.0, 2.0)
    rows[-1] = row("ours", BIT_IDENTICAL, value="stock's own runs differ")
    write(tmp_path, "training_step", *rows)
    (found,) = comparisons(last_rows(tmp_path))
    assert "stock's own runs differ" in found.cells
    assert "yes" not in found.cells


@pytest.mark.parametrize(
    ("cores", "median", "expected"),
    [(2, 1.7, "- met: "), (2, 1.5, "**missed**, 1.5x"), (64, 1.5, "not measured")],
)
def test_aims_are_checked_against_the_rows(cores: int, median: float, expected: str, tmp_path: Path) -> None:
    samples, labels = [median, 9.0, 0.1], {"unit": "times", "setting": {}}
    (aim,) = (aim for aim in AIMS if "1.55x" in aim.text)
    rows = write(tmp_path, "update_phase", row(aim.variant, aim.quantity, *samples, **labels), cores=cores)
    lines = list(aim_lines(rows))
    found = [line for line in lines if aim.text in line] or lines[-1:]
    assert expected in found[0]
    assert sum("not measured" in line for line in lines) == len(AIMS) - (cores == 2)


def test_an_aim_is_checked_against_its_worst_row(tmp_path: Path) -> None:
    (aim,) = (aim for aim in AIMS if "iteration predicted" in aim.text)
    rows = write(tmp_path, "emulated", *(row(f"{error}", aim.quantity, error) for error in (0.02, -0.3, 0.2)))
    worst = aim.worst(rows)
    assert worst is not None
    assert worst["variant"] == "-0.3"
    assert aim.worst([]) is None


def test_an_aim_for_the_bits_is_missed_if_one_variant_differs_from_stock(tmp_path: Path) -> None:
    (aim,) = (aim for aim in AIMS if aim.text == "2 cores: same bits")
    bits = {"ours": True, "ours, all on the CPU": False, "ZenFlow": False}
    rows = write(tmp_path, "adam", *(row(variant, BIT_IDENTICAL, value=same) for variant, same in bits.items()))
    worst = aim.worst(rows)
    assert worst is not None
    assert (worst["variant"], aim.margin(worst) < 0) == ("ours, all on the CPU", True)
    assert aim.worst(rows[2:]) is None


UNMEASURED = {"GPU, batch 8: cost at most 10 %"}
"""The aims whose quantities are newer than the last run of their benchmarks, which must measure them."""


def test_every_aim_names_a_quantity_that_its_benchmark_measures() -> None:
    """Check the committed rows."""
    rows = last_rows(RESULTS)
    assert {aim.text for aim in AIMS if aim.worst(rows) is None} == UNMEASURED


def test_committed_page_shows_the_committed_rows(tmp_path: Path) -> None:
    for path in RESULTS.glob("*.jsonl"):
        (tmp_path / path.name).write_text(path.read_text())
    page = report(tmp_path)
    assert (RESULTS.parent / "RESULTS.md").read_text() == page, "run python -m benchmarks report"
    assert (RESULTS / CHART).stat().st_size > 10_000, "not an empty figure"
    assert len(page.split()) <= MOST_WORDS
    assert page.count("![") == 1
    assert page.count("|---|\n") == 3


def test_committed_rows_are_small_and_belong_to_a_benchmark() -> None:
    files = [path for path in RESULTS.iterdir() if path.name != CHART]
    assert {path.stem for path in files} <= BENCHMARKS.keys()
    assert {path.suffix for path in files} == {".jsonl"}
    assert sum(path.stat().st_size for path in files) <= MOST_BYTES
