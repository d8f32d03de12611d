"""How much does the plugin cost where it cannot gain anything: a model of one million parameters, updated on the CPU?

The plugin runs with both overlaps, and with the update done when ``step()`` returns.

Units cost something, too: the same model is updated once in DeepSpeed's sub-groups of some size, and once in units of
at most that size inside sub-groups of DeepSpeed's default size. The update is done when ``step()`` returns.

On a CPU that trains, updates in backward compete with it for all cores. A larger model trains with and without them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from benchmarks.harness import variants
from benchmarks.harness.charts import Bars
from benchmarks.harness.interleaved_runs import EngineRun, run_interleaved
from benchmarks.harness.rows import Row
from benchmarks.harness.run_rows import (
    all_samples,
    configuration_rows,
    error_rows,
    labels_of,
    rows_of_runs,
    same_bits_row,
)
from benchmarks.harness.setting import TrainingSetting
from benchmarks.harness.sizes import LARGER_ON_CPU, Repetitions, default_setting, with_default_sub_groups
from benchmarks.harness.variants import NO_OVERLAP, Variant, ours

SETTING = TrainingSetting(layers=5, width=128, context=128, micro_batch=4)
"""1.07 M parameters."""

PLACEMENTS = ("cpu", "streamed")
"""The placements whose updates are compared in units and in sub-groups."""

COST_OF_UNITS = "step() / step() with sub-groups"
COST_OF_EAGER_UPDATES = "iteration / iteration without eager updates"

CHART = Bars("iteration", "iteration / stock's iteration")


def measure(*, quick: bool) -> Iterator[Row]:
    """Yield the iteration times of stock and of ours, and their ratio, then what units and eager updates cost."""
    compared = (variants.STOCK, ours("ours", placement="cpu"), variants.ALL_CPU)
    repetitions = Repetitions(iterations=5, rounds=2) if quick else Repetitions(iterations=40, rounds=6)
    yield from rows_of_runs(run_interleaved(compared, SETTING, repetitions), _rows)

    setting = default_setting(quick=quick)
    repetitions = Repetitions(iterations=2, rounds=1) if quick else Repetitions(iterations=8, rounds=10)
    pairs = [(in_sub_groups(setting, placement), in_units(setting, placement)) for placement in PLACEMENTS]
    yield from _ratios(pairs, setting, repetitions, "step()", COST_OF_UNITS)

    setting = setting if quick else LARGER_ON_CPU[1]
    repetitions = Repetitions(iterations=2, rounds=1) if quick else Repetitions(iterations=5, rounds=4)
    yield from _ratios(
        [(unclipped(eager=False), unclipped(eager=True))], setting, repetitions, "iteration", COST_OF_EAGER_UPDATES
    )


def _ratios(
    pairs: Sequence[tuple[Variant, Variant]], setting: TrainingSetting, repetitions: Repetitions, timed: str, ratio: str
) -> Iterator[Row]:
    """Yield the seconds of ``timed`` of each variant, and the second variant's over the first one's in each round."""
    name = {"step()": "step_s", "iteration": "iteration_s"}[timed]
    runs = run_interleaved([variant for pair in pairs for variant in pair], setting, repetitions)
    yield from error_rows(runs.errors, setting)
    for pair in pairs:
        if any(variant.name in runs.errors for variant in pair):
            continue
        both = [runs.completed[variant.name] for variant in pair]
        for variant, variant_runs in zip(pair, both, strict=True):
            labels = labels_of(variant.name, setting)
            yield Row(quantity=timed, unit="s", samples=all_samples(variant_runs, name), **labels)
            yield from configuration_rows(variant_runs, **labels)
        base, changed = ([median(getattr(run, name)) for run in variant_runs] for variant_runs in both)
        ratios = [changed_s / base_s for changed_s, base_s in zip(changed, base, strict=True)]
        yield Row(quantity=ratio, unit="times", samples=ratios, **labels_of(pair[1].name, setting))


def in_sub_groups(setting: TrainingSetting, placement: str) -> Variant:
    """Return the variant in which each of DeepSpeed's sub-groups is one unit."""
    block = {"placement": placement, "unit_size": setting.parameters}
    return ours(f"ours, {placement}, sub-groups", **block, **NO_OVERLAP)


def in_units(setting: TrainingSetting, placement: str) -> Variant:
    """Return the variant with units as large as the setting's sub-groups, in sub-groups of DeepSpeed's default size.

    DeepSpeed ends a sub-group with the parameter that reaches ``sub_group_size``, so that it is up to 30 % larger here.
    """
    block = {"placement": placement, "unit_size": setting.sub_group_size * 13 // 10}
    variant = ours(f"ours, {placement}, units", **block, **NO_OVERLAP)
    # Norms are summed per sub-group, so the bits are those of stock with these sub-groups.
    return replace(variant, zero={"sub_group_size": with_default_sub_groups(setting).sub_group_size}, exact=False)


def unclipped(*, eager: bool) -> Variant:
    """Return the variant without clipping, so that no update in backward is in vain, with all units eager or none."""
    name = f"ours, no clipping, {'all' if eager else 'none'} eager"
    # Not exact: stock clips.
    return replace(ours(name, placement="cpu", eager=eager), clipping=0.0, exact=False)


def _rows(runs: Sequence[EngineRun], stock_runs: Sequence[EngineRun], **labels: Any) -> Iterator[Row]:
    yield Row(quantity="iteration", unit="s", samples=all_samples(runs, "iteration_s"), **labels)
    # Iterations take milliseconds and vary, so the medians of the runs are compared.
    ratios = [run.median_s / stock_run.median_s for run, stock_run in zip(runs, stock_runs, strict=True)]
    yield Row(quantity="iteration / stock's iteration", unit="times", samples=ratios, **labels)
    yield same_bits_row(runs, stock_runs, **labels)
