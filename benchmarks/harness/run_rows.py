"""Turn the runs of engines into rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.harness.bf16_products import are_computed_in_fp32
from benchmarks.harness.interleaved_runs import EngineRun, InterleavedRuns
from benchmarks.harness.rows import BIT_IDENTICAL, COST, COST_SHARE, ITERATION_SPEEDUP, RETAINED, Row
from benchmarks.harness.setting import TrainingSetting, trains_on_gpu
from benchmarks.harness.variants import STOCK, Variant


def labels_of(variant: str, setting: TrainingSetting) -> dict[str, Any]:
    """Return the fields that all rows of a variant share, to be passed to ``Row`` as keywords."""
    described = {**asdict(setting), "parameters": setting.parameters}
    if are_computed_in_fp32():
        described["bf16_products"] = "in fp32"
    if trains_on_gpu():
        described["algorithms"] = "deterministic only"
    return {"variant": variant, "setting": described}


def waived_rows(variants: Sequence[Variant], quantity: str, setting: TrainingSetting) -> Iterator[Row]:
    """Yield a waived row for each variant that cannot run here."""
    for variant in variants:
        if (reason := variant.waived_reason(setting)) is not None:
            yield Row(quantity=quantity, waived=reason, **labels_of(variant.name, setting))


def runnable(variants: Sequence[Variant], setting: TrainingSetting) -> list[Variant]:
    """Return the variants that can run here."""
    return [variant for variant in variants if variant.waived_reason(setting) is None]


def error_rows(errors: Mapping[str, str], setting: TrainingSetting) -> Iterator[Row]:
    """Yield rows that record the errors by variant, and that make the run of the benchmark fail."""
    for name, error in errors.items():
        yield Row(quantity="completed all runs", value=False, claimed=True, **labels_of(name, setting))
        yield Row(quantity="error", value=error, **labels_of(name, setting))


def rows_of_runs(runs: InterleavedRuns, make_rows: Callable[..., Iterable[Row]]) -> Iterator[Row]:
    """Yield ``make_rows(runs, stock_runs, **labels)`` and the configuration of every variant that completed its runs.

    For variants that failed, the error is recorded. If stock was to run and failed, no other variant has rows, since
    there is nothing to compare it with.
    """
    yield from error_rows(runs.errors, runs.setting)
    if STOCK.name in runs.errors:
        return
    stock_runs = runs.completed.get(STOCK.name, [])
    for name, variant_runs in runs.completed.items():
        labels = labels_of(name, runs.setting)
        yield from make_rows(variant_runs, stock_runs, **labels)
        yield from configuration_rows(variant_runs, **labels)


def all_samples(runs: Sequence[EngineRun], name: str) -> list[float]:
    """Return the samples of all iterations of all runs from the attribute ``name`` of ``EngineRun``."""
    return [sample for run in runs for sample in getattr(run, name)]


def speedups(runs: Sequence[EngineRun], stock_runs: Sequence[EngineRun], name: str) -> list[float]:
    """Return the seconds of ``stock_runs`` per second of ``runs``, for each iteration of the same round."""
    pairs = zip(all_samples(stock_runs, name), all_samples(runs, name), strict=True)
    return [stock_s / sample_s for stock_s, sample_s in pairs]


def phase_rows(runs: Sequence[EngineRun], stock_runs: Sequence[EngineRun], **labels: Any) -> Iterator[Row]:
    """Yield the seconds of an iteration and of its phases, the speedup, and whether the bits match stock's."""
    yield Row(quantity="forward", unit="s", samples=all_samples(runs, "forward_s"), **labels)
    yield Row(quantity="backward", unit="s", samples=all_samples(runs, "backward_s"), **labels)
    yield Row(quantity="step()", unit="s", samples=all_samples(runs, "step_s"), **labels)
    yield Row(quantity="iteration", unit="s", samples=all_samples(runs, "iteration_s"), **labels)
    ratios = speedups(runs, stock_runs, "iteration_s")
    yield Row(quantity=ITERATION_SPEEDUP, unit="times", samples=ratios, **labels)
    yield same_bits_row(runs, stock_runs, **labels)


def cost_rows(runs: Sequence[EngineRun], stock_runs: Sequence[EngineRun], **labels: Any) -> Iterator[Row]:
    """Yield the iteration without updates, and the cost of the update with one sample per round."""
    yield Row(quantity="iteration without updates", unit="s", samples=all_samples(runs, "without_updates_s"), **labels)
    yield Row(quantity=COST, unit="s", samples=[run.cost_s for run in runs], **labels)
    if any(stock.cost_s <= 0 for stock in stock_runs):
        yield Row(quantity=COST_SHARE, waived="stock's cost is below the noise of this machine", **labels)
        return
    shares = [run.cost_s / stock.cost_s for run, stock in zip(runs, stock_runs, strict=True)]
    yield Row(quantity=COST_SHARE, unit="share", samples=shares, **labels)


def retained_row(runs: Sequence[EngineRun], no_offload_runs: Sequence[EngineRun], **labels: Any) -> Row:
    """Return the row of tokens per second over those without offload; waived if ``no_offload_runs`` is empty."""
    if not no_offload_runs:
        return Row(quantity=RETAINED, waived="no offload did not run", **labels)
    return Row(quantity=RETAINED, unit="share", samples=speedups(runs, no_offload_runs, "iteration_s"), **labels)


def same_bits_row(runs: Sequence[EngineRun], stock_runs: Sequence[EngineRun], **labels: Any) -> Row:
    """Return the row that compares the bits with stock's.

    If stock's own runs differ, as they did on GPUs with algorithms that are not deterministic, the row makes no claim.
    """
    if not all(run.same_bits_as(stock_runs[0]) for run in stock_runs):
        return Row(quantity=BIT_IDENTICAL, value="stock's own runs differ", **labels)
    same = all(run.same_bits_as(stock_runs[0]) for run in runs)
    return Row(quantity=BIT_IDENTICAL, value=same, claimed=runs[0].variant.exact, **labels)


def configuration_rows(runs: Sequence[EngineRun], **labels: Any) -> Iterator[Row]:
    """Yield the configuration of the engine, and the plan if there is one."""
    yield Row(quantity="configuration", value=runs[0].configuration, **labels)
    if runs[0].plan is not None:
        yield Row(quantity="plan", value=str(runs[0].plan), **labels)
