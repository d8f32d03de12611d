"""How long does the update take, and how many parameters per second is that?

``engine.step()`` is timed for stock ZeRO-3 offloading, for DeepSpeed's other ways to offload, and for ours by
placement; stock and ours also run with DeepSpeed's default sub-group size. The update is done when ``step()`` returns.
For variants that also update in backward or in the next iterations, the time does not cover the whole update, and has
another label.

An update on the CPU that is limited by host memory moves 42 bytes per parameter with stock and 28 with ours, so that
1.5 times the speed of stock is about the most that ours can reach there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.harness import variants
from benchmarks.harness.interleaved_runs import EngineRun, run_interleaved
from benchmarks.harness.rows import UPDATE_SPEEDUP, Row
from benchmarks.harness.run_rows import all_samples, rows_of_runs, runnable, same_bits_row, speedups, waived_rows
from benchmarks.harness.setting import default_setting, repetitions, with_default_sub_groups


def measure(*, quick: bool) -> Iterator[Row]:
    """Yield the update times of each variant."""
    setting = default_setting(quick=quick)
    for measured, compared in (
        (setting, variants.competitors(setting)),
        (with_default_sub_groups(setting), (variants.STOCK, variants.ALL_CPU, variants.PLANNED)),
    ):
        yield from waived_rows(compared, "update", measured)
        runs = run_interleaved(runnable(compared, measured), measured, repetitions(quick=quick))
        yield from rows_of_runs(runs, _rows)


def _rows(runs: Sequence[EngineRun], stock_runs: Sequence[EngineRun], **labels: Any) -> Iterator[Row]:
    variant, setting = runs[0].variant, runs[0].setting
    step_s = all_samples(runs, "step_s")
    if not variant.done_in_step:
        yield Row(quantity="step(), a part of the update", unit="s", samples=step_s, **labels)
        return
    yield Row(quantity="update", unit="s", samples=step_s, **labels)
    rates = [setting.parameters / duration_s for duration_s in step_s]
    yield Row(quantity="update rate", unit="parameters/s", samples=rates, **labels)
    yield Row(quantity=UPDATE_SPEEDUP, unit="times", samples=speedups(runs, stock_runs, "step_s"), **labels)
    yield same_bits_row(runs, stock_runs, **labels)
