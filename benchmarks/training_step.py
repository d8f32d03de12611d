"""How long does an iteration take, by phase?

The rows have forward, backward, the exposed update, the iteration, tokens per second, MFU and memory. They compare
stock, DeepSpeed's other ways to offload, and ours. Stock and ours also run with larger micro-batches, with more of them
per step, with larger models, and with DeepSpeed's default sub-group size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.harness import variants
from benchmarks.harness.charts import Bars
from benchmarks.harness.device import trains_on_gpu
from benchmarks.harness.interleaved_runs import EngineRun, run_interleaved
from benchmarks.harness.rows import Row
from benchmarks.harness.run_rows import all_samples, labels_of, phase_rows, rows_of_runs, runnable, waived_rows
from benchmarks.harness.setting import TrainingSetting
from benchmarks.harness.sizes import (
    Repetitions,
    default_setting,
    fewest_repetitions,
    fits_host_memory,
    larger_settings,
    repetitions,
    with_default_sub_groups,
)
from benchmarks.harness.targets import ITERATION_SPEEDUP
from benchmarks.harness.variants import Variant
from deep_opt_states.host import machine
from deep_opt_states.profiler.peaks import peak_flops

ACCUMULATIONS = (4, 16)
MICRO_BATCH = 8

CHART = Bars(("forward", "backward", "update exposed"), ITERATION_SPEEDUP)


def measure(*, quick: bool) -> Iterator[Row]:
    """Yield the rows of stock and ours in each setting, then those of all variants in the usual setting."""
    setting = default_setting(quick=quick)
    usual, fewest = repetitions(quick=quick), fewest_repetitions(quick=quick)
    pair = (variants.STOCK, variants.OURS_DEFAULT)
    # The settings of the targets come first: if the run is stopped by a time limit, later rows may be missing. All
    # variants come last, with these two among them, since runs are compared within one round only.
    yield from _compare(setting, pair, usual)
    yield from _compare(replace(setting, micro_batch=MICRO_BATCH), pair, usual)
    for accumulation in ACCUMULATIONS:
        yield from _compare(replace(setting, accumulation=accumulation), pair, fewest)
    for larger in [] if quick else larger_settings():
        yield from _compare_larger(larger, pair, fewest)
    yield from _compare(with_default_sub_groups(setting), pair, usual)
    yield from _compare(setting, (*variants.competitors(setting), *pair[1:], variants.NO_OFFLOAD), usual)


def _compare_larger(setting: TrainingSetting, pair: Sequence[Variant], repetitions: Repetitions) -> Iterator[Row]:
    if fits_host_memory(setting):
        yield from _compare(setting, pair, repetitions)
        return
    for variant in pair:
        labels = labels_of(variant.name, setting)
        yield Row(quantity="iteration", waived="stock does not fit into host memory", **labels)


def _compare(setting: TrainingSetting, compared: Sequence[Variant], repetitions: Repetitions) -> Iterator[Row]:
    yield from waived_rows(compared, "iteration", setting)
    yield from rows_of_runs(run_interleaved(runnable(compared, setting), setting, repetitions), _rows)


def _rows(runs: Sequence[EngineRun], stock_runs: Sequence[EngineRun], **labels: Any) -> Iterator[Row]:
    setting = runs[0].setting
    yield from phase_rows(runs, stock_runs, **labels)
    iteration_s = all_samples(runs, "iteration_s")
    rates = [setting.tokens / duration_s for duration_s in iteration_s]
    yield Row(quantity="throughput", unit="tokens/s", samples=rates, **labels)
    gpu = machine.gpu() if trains_on_gpu() else None
    peak = None if gpu is None else peak_flops(gpu.name)
    if peak is None:
        yield Row(quantity="MFU", waived="the peak FLOP/s of this processor is not known", **labels)
    else:
        shares = [setting.flops / duration_s / peak for duration_s in iteration_s]
        yield Row(quantity="MFU", unit="share", samples=shares, **labels)
        yield Row(quantity="peak that MFU refers to", unit="FLOP/s", samples=[peak], **labels)
    if gpu is None:
        yield Row(quantity="peak GPU memory", waived="no GPU", **labels)
        yield Row(quantity="pinned memory", waived="no GPU", **labels)
    else:
        yield Row(quantity="peak GPU memory", unit="bytes", samples=[run.gpu_peak_bytes for run in runs], **labels)
        yield Row(quantity="pinned memory", unit="bytes", samples=[run.pinned_bytes for run in runs], **labels)
    yield Row(quantity="host memory of the process", unit="bytes", samples=[run.host_bytes for run in runs], **labels)
