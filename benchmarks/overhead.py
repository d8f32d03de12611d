"""How much does the plugin cost where it cannot gain anything: a model of one million parameters, updated on the CPU?

The plugin runs with both overlaps, and with the update done when ``step()`` returns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.harness import variants
from benchmarks.harness.charts import Bars
from benchmarks.harness.interleaved_runs import EngineRun, run_interleaved
from benchmarks.harness.rows import Row
from benchmarks.harness.run_rows import all_samples, rows_of_runs, same_bits_row
from benchmarks.harness.setting import TrainingSetting
from benchmarks.harness.sizes import Repetitions
from benchmarks.harness.variants import ours

SETTING = TrainingSetting(layers=5, width=128, context=128, micro_batch=4)
"""1.07 M parameters."""

CHART = Bars("iteration", "iteration / stock's iteration")


def measure(*, quick: bool) -> Iterator[Row]:
    """Yield the iteration times of stock and of ours, and their ratio."""
    compared = (variants.STOCK, ours("ours", placement="cpu"), variants.ALL_CPU)
    repetitions = Repetitions(iterations=5, rounds=2) if quick else Repetitions(iterations=40, rounds=6)
    yield from rows_of_runs(run_interleaved(compared, SETTING, repetitions), _rows)


def _rows(runs: Sequence[EngineRun], stock_runs: Sequence[EngineRun], **labels: Any) -> Iterator[Row]:
    yield Row(quantity="iteration", unit="s", samples=all_samples(runs, "iteration_s"), **labels)
    # Iterations take milliseconds and vary, so the medians of the runs are compared.
    ratios = [run.median_s / stock_run.median_s for run, stock_run in zip(runs, stock_runs, strict=True)]
    yield Row(quantity="iteration / stock's iteration", unit="times", samples=ratios, **labels)
    yield same_bits_row(runs, stock_runs, **labels)
