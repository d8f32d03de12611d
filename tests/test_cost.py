"""Check that engines train without updates when a benchmark asks for it, and how the cost of the update is computed."""

from __future__ import annotations

import pytest
import torch

from benchmarks import training_step
from benchmarks.harness import variants
from benchmarks.harness.interleaved_runs import EngineRun, InterleavedRuns
from benchmarks.harness.run_rows import cost_rows, retained_row
from benchmarks.harness.setting import ON_CPU, Repetitions
from benchmarks.harness.variants import NO_OFFLOAD
from tests.launch import run_ranks


def run_of(iteration_s: list[float], without_updates_s: list[float] | None = None) -> EngineRun:
    return EngineRun(
        training_step.STOCK, ON_CPU, iteration_s=iteration_s, without_updates_s=without_updates_s or [], step_s=[1.0]
    )


def test_an_engine_without_updates_does_everything_else() -> None:
    (finished,) = run_ranks(1, ["-m", "tests.cost_ranks"], timeout_s=250)
    assert finished.returncode == 0, finished.output[-4000:]
    stock, *ours = finished.answers()
    assert [run["variant"] for run in (stock, *ours)] == ["stock", "ours", variants.STREAMED_AND_OVERLAPPED.name]
    for run in (stock, *ours):
        before, without, after = run["before"], run["without"], run["after"]
        assert without["digest"] == before["digest"]
        # The first forward already reads what the update before has written.
        assert without["losses"] == without["losses"][:1] * 3
        assert without["losses"][0] < before["losses"][-1]
        assert (before["steps"], without["steps"], after["steps"]) == (2, 5, 6)
        assert after["losses"] == without["losses"][:1]
        assert after["digest"] != without["digest"]
        # The gradients and their norm are those of stock.
        assert [before["norm"], without["norm"]] == [stock["before"]["norm"], stock["without"]["norm"]]
    assert [run["before"]["pending"] for run in ours] == [True, True]
    assert [run["without"]["pending"] for run in ours] == [False, False]


def test_cost_is_the_difference_of_medians_in_the_same_round() -> None:
    stock_runs = [run_of([5.0, 6.0, 9.0], [2.0, 2.0, 1.0]), run_of([4.0, 4.0, 4.0], [2.0, 2.0, 2.0])]
    runs = [run_of([3.0, 9.0, 2.0], [1.0, 2.0, 2.0]), run_of([3.0, 3.0, 3.0], [2.5, 2.5, 2.5])]
    samples = {row.quantity: row.samples for row in cost_rows(runs, stock_runs, variant="ours")}
    assert samples == {
        "iteration without updates": [1.0, 2.0, 2.0, 2.5, 2.5, 2.5],
        "cost of the update": [1.0, 0.5],
        "cost / stock's cost": [0.25, 0.25],
    }


def test_retained_are_the_tokens_per_second_of_those_without_offload() -> None:
    row = retained_row([run_of([4.0, 2.0])], [run_of([1.0, 1.0])], variant="ours")
    assert (row.unit, row.samples) == ("share", [0.25, 0.5])
    assert retained_row([run_of([4.0])], [], variant="ours").waived == "no offload did not run"


@pytest.mark.parametrize(
    ("error", "waived"), [(torch.OutOfMemoryError("CUDA out of memory"), True), (ValueError("a shape"), False)]
)
def test_no_offload_that_runs_out_of_memory_is_waived(
    error: Exception, waived: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = InterleavedRuns(ON_CPU, {}, {NO_OFFLOAD.name: f"{type(error).__name__}: {error}"})
    monkeypatch.setattr(training_step, "run_interleaved", lambda *args: runs)
    rows = list(training_step._compare(ON_CPU, training_step.COMPARED, Repetitions(iterations=1, rounds=1)))
    assert [row.quantity for row in rows if row.waived] == (["iteration"] if waived else [])
    assert any(row.claimed for row in rows) == (not waived)
