"""Check that the benchmarks run without a GPU, that exact variants match stock's bits, and how rows are shown."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.emulated.arms import PLANNED
from benchmarks.gpu import rows_of
from benchmarks.gpu.arms import ArmJob, bits_jobs
from benchmarks.gpu.processes import ArmOutcome
from benchmarks.harness.rows import BENCHMARKS, COST, COST_SHARE, EMULATED, RESULTS, RETAINED, Row, last_rows, read_rows
from benchmarks.harness.variants import NO_OFFLOAD, STOCK
from benchmarks.report import AIMS, CHART, report
from tests.launch import run_ranks
from tests.tiers import thorough


def run(name: str, folder: Path, *options: str, timeout_s: float = 250) -> list[dict[str, Any]]:
    (finished,) = run_ranks(1, ["-m", "benchmarks", name, *options, "--output", str(folder)], timeout_s)
    assert finished.returncode == 0, finished.output[-4000:]
    rows = read_rows(folder / f"{name}.jsonl")
    assert not [row for row in rows if row.get("failed")]
    return rows


@pytest.mark.P1
@pytest.mark.parametrize("name", [thorough("update_phase"), "ablation"])
def test_every_exact_variant_is_bit_identical_to_stock(name: str, tmp_path: Path) -> None:
    rows = run(name, tmp_path, "--quick")
    bits = {row["variant"]: row["value"] for row in rows if row["quantity"] == "bit-identical to stock"}
    measured = [row for row in rows if row["quantity"] in ("update", "step()") and "median" in row]
    seconds = {row["variant"]: row["median"] for row in measured}
    assert len(bits) >= 5
    assert bits.keys() <= seconds.keys()
    assert all(value > 0 for value in seconds.values())
    assert {variant for variant, same in bits.items() if not same} <= {"Twin-Flow", "stock, no clipping"}
    classes = {row["variant"]: row["value"].split()[0] for row in rows if row["quantity"] == "configuration"}
    assert classes.keys() == bits.keys()
    assert classes["stock"] == "DeepSpeedZeroOptimizer_Stage3"


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["adam", "training_step", "hooks", "published", "emulated"])
def test_quick_run_gives_numbers_and_no_failed_claim(name: str, tmp_path: Path) -> None:
    rows = run(name, tmp_path, "--quick", timeout_s=600)
    assert any("median" in row for row in rows)
    if name == "emulated":
        assert not [row for row in rows if row.get("unit") == "s" and EMULATED not in row["quantity"]]
        bits = {row["variant"]: row["value"] for row in rows if row["quantity"].startswith("bit-identical")}
        assert set(bits) >= {"stock", PLANNED}
        assert all(bits.values())


def tiny(arm: str, *tokens: int) -> ArmJob:
    return ArmJob(arm=arm, model="tiny", tokens=tokens or (64,))


def record(mean_s: float, **others: object) -> dict[str, Any]:
    return {
        "tokens": 64,
        "configuration": "an engine",
        "iteration_s": [mean_s] * 3,
        "mean_s": mean_s,
        "phases_s": [[0.1] * 3] * 3,
        "losses": [2.0, 1.0],
        "gpu_peak_bytes": 0,
        "host_peak_bytes": 10**9,
        **others,
    }


def medians(rows: list[Row], variant: str) -> dict[str, float]:
    return {row.quantity: sorted(row.samples)[0] for row in rows if row.variant == variant and row.samples}


def test_cost_and_retained_refer_to_stock_and_to_no_offload() -> None:
    def outcome(arm: str, mean_s: float, without_s: float, **others: object) -> ArmOutcome:
        return ArmOutcome(job=tiny(arm), records=[[record(mean_s, without_updates_s=[without_s], **others)]])

    outcomes = [outcome(NO_OFFLOAD.name, 1.5, 1.4), outcome(STOCK.name, 4.0, 2.0), outcome("ours", 2.5, 2.0, joules=7)]
    rows = list(rows_of(iter(outcomes)))
    found = medians(rows, "ours")
    assert found[COST] == 0.5
    assert found[COST_SHARE] == 0.25
    assert found[RETAINED] == 0.6
    assert found["throughput"] == 64 / 2.5
    assert found["energy of an iteration"] == 7
    assert medians(rows, STOCK.name)[RETAINED] == 1.5 / 4.0
    alone = list(rows_of(iter(outcomes[1:2])))
    assert [row.waived for row in alone if row.quantity == RETAINED] == ["no offload has no result"]


def test_other_bits_and_losses_are_a_claim_that_does_not_hold() -> None:
    stock, ours = bits_jobs("tiny", 64, ranks=1)
    same = ArmOutcome(job=stock, records=[[record(1.0, digest="1")]])
    for others in ({"digest": "2"}, {"digest": "1", "losses": [2.0, 1.1]}):
        (row,) = rows_of(iter([same, ArmOutcome(job=ours, records=[[record(1.0, **others)]])]))
        assert (row.value, row.claimed) == (False, True)
    failed = ArmOutcome(job=stock, records=[[]], error="no memory")
    rows = list(rows_of(iter([failed, replace(same, job=ours)])))
    assert [row.quantity for row in rows] == ["completed", "error"], "there is nothing to compare with"


def test_the_committed_page_shows_the_committed_rows_which_measure_the_aims(tmp_path: Path) -> None:
    rows = last_rows(RESULTS)
    # The quantity of this aim is newer than the last run of its benchmark.
    assert {aim.text for aim in AIMS if aim.worst(rows) is None} == {"GPU, batch 8: cost at most 10 %"}
    files = [path for path in RESULTS.iterdir() if path.name != CHART]
    assert {path.name for path in files} <= {f"{name}.jsonl" for name in BENCHMARKS}
    assert sum(path.stat().st_size for path in files) <= 300_000
    for path in files:
        (tmp_path / path.name).write_text(path.read_text())
    page = report(tmp_path)
    assert (RESULTS.parent / "RESULTS.md").read_text() == page, "run python -m benchmarks report"
    assert (RESULTS / CHART).stat().st_size > 10_000, "not an empty figure"
    assert len(page.split()) <= 800
    assert (page.count("!["), page.count("|---|\n")) == (1, 3)
