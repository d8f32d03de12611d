"""How long does an iteration take, by phase?

The rows show the iteration with and without updates, the cost of the update, tokens per second, the share of those
without offload that is retained, the phases and memory. They compare stock, no offload, DeepSpeed's other ways to
offload, and ours. Stock, no offload and ours also run with larger micro-batches, with more of them per step, with
larger models, and with DeepSpeed's default sub-group size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.harness import variants
from benchmarks.harness.interleaved_runs import EngineRun, run_interleaved
from benchmarks.harness.rows import Row
from benchmarks.harness.run_rows import (
    all_samples,
    cost_rows,
    labels_of,
    phase_rows,
    retained_row,
    rows_of_runs,
    runnable,
    waived_rows,
)
from benchmarks.harness.setting import (
    Repetitions,
    TrainingSetting,
    default_setting,
    fewest_repetitions,
    fits_host_memory,
    larger_settings,
    repetitions,
    trains_on_gpu,
    with_default_sub_groups,
)
from benchmarks.harness.variants import NO_MEMORY, NO_OFFLOAD, Variant

ACCUMULATIONS = (4, 16)
MICRO_BATCH = 8

STOCK, OURS = (replace(variant, measures_cost=True) for variant in (variants.STOCK, variants.OURS_DEFAULT))
COMPARED = (STOCK, OURS, NO_OFFLOAD)


def measure(*, quick: bool) -> Iterator[Row]:
    """Yield the rows of ``COMPARED`` in each setting, then of all variants in the usual setting."""
    setting = default_setting(quick=quick)
    usual, fewest = repetitions(quick=quick), fewest_repetitions(quick=quick)
    # On a GPU, the settings of the targets come first, since a time limit may stop the run. All variants come last, and
    # these are among them: runs are compared within one round only.
    if trains_on_gpu():
        yield from _compare(setting, COMPARED, usual)
    yield from _compare(replace(setting, micro_batch=MICRO_BATCH), COMPARED, usual)
    for accumulation in ACCUMULATIONS:
        yield from _compare(replace(setting, accumulation=accumulation), COMPARED, fewest)
    for larger in [] if quick else larger_settings():
        yield from _compare_larger(larger, fewest)
    yield from _compare(with_default_sub_groups(setting), COMPARED, usual)
    yield from _compare(setting, (STOCK, *variants.competitors(setting)[1:], OURS, NO_OFFLOAD), usual)


def _compare_larger(setting: TrainingSetting, repetitions: Repetitions) -> Iterator[Row]:
    if fits_host_memory(setting):
        yield from _compare(setting, COMPARED, repetitions)
        return
    for variant in (STOCK, OURS):
        labels = labels_of(variant.name, setting)
        yield Row(quantity="iteration", waived="stock does not fit into host memory", **labels)


def _compare(setting: TrainingSetting, compared: Sequence[Variant], repetitions: Repetitions) -> Iterator[Row]:
    yield from waived_rows(compared, "iteration", setting)
    runs = run_interleaved(runnable(compared, setting), setting, repetitions)
    if torch.OutOfMemoryError.__name__ in runs.errors.get(NO_OFFLOAD.name, ""):
        del runs.errors[NO_OFFLOAD.name]
        yield Row(quantity="iteration", waived=NO_MEMORY, **labels_of(NO_OFFLOAD.name, setting))
    yield from rows_of_runs(runs, partial(_rows, runs.completed.get(NO_OFFLOAD.name, ())))


def _rows(
    no_offload_runs: Sequence[EngineRun], runs: Sequence[EngineRun], stock_runs: Sequence[EngineRun], **labels: Any
) -> Iterator[Row]:
    if runs[0].variant.measures_cost:
        yield from cost_rows(runs, stock_runs, **labels)
    yield retained_row(runs, no_offload_runs, **labels)
    yield from phase_rows(runs, stock_runs, **labels)
    rates = [runs[0].setting.tokens / duration_s for duration_s in all_samples(runs, "iteration_s")]
    yield Row(quantity="throughput", unit="tokens/s", samples=rates, **labels)
    if trains_on_gpu():
        yield Row(quantity="peak GPU memory", unit="bytes", samples=[run.gpu_peak_bytes for run in runs], **labels)
    yield Row(quantity="host memory of the process", unit="bytes", samples=[run.host_bytes for run in runs], **labels)
