"""How accurate are the predictions of the update time, over a grid of placements and unit sizes?

The predictions use a profile of this machine that is measured just before, as users do. The predicted time is that of
the whole update, which is done when ``step()`` returns. The error is predicted divided by measured, minus 1; one sample
is the median of a run. The time of ``step()`` is also compared with the lower bound of an update. The planned placement
runs before the grid: if the run is stopped by a time limit, the grid may be missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness.charts import Bars
from benchmarks.harness.interleaved_runs import EngineRun, run_interleaved
from benchmarks.harness.rows import Row
from benchmarks.harness.run_rows import all_samples, rows_of_runs
from benchmarks.harness.setting import measured_profile
from benchmarks.harness.sizes import Repetitions, default_setting
from benchmarks.harness.variants import NO_OVERLAP, Variant, ours, planned
from benchmarks.update_phase import lower_bound
from deep_opt_states.report.record import UPDATE
from perf_model.prediction.hardware import HardwareProfile

PLACEMENTS: dict[str, dict[str, Any]] = {
    "0% streamed": {"placement": "cpu"},
    "25% streamed": {"placement": "stride", "update_stride": 4},
    "50% streamed": {"placement": "stride", "update_stride": 2},
    "100% streamed": {"placement": "streamed"},
}
SIZE_FACTORS = (1, 4)
"""Sizes of sub-groups, and of units unless they are planned, as multiples of the usual one."""

CHART = Bars("prediction error", "predicted update", "measured update")


def measure(*, quick: bool) -> Iterator[Row]:
    """Yield predicted and measured times for each placement and size."""
    base = default_setting(quick=quick)
    repetitions = Repetitions(iterations=3, rounds=1) if quick else Repetitions(iterations=8, rounds=2)
    with measured_profile(quick=quick) as path:
        profile = HardwareProfile.read(path)
        for factor in SIZE_FACTORS:
            setting = replace(base, sub_group_size=factor * base.sub_group_size)
            plan, *grid = _variants(path, setting.sub_group_size)
            for variants in ([plan], grid):
                runs = run_interleaved(variants, setting, repetitions)
                yield from rows_of_runs(runs, partial(_rows, profile))


def _rows(
    profile: HardwareProfile, runs: Sequence[EngineRun], stock_runs: Sequence[EngineRun], **labels: Any
) -> Iterator[Row]:
    """Yield the rows of one variant. Stock does not run in this benchmark."""
    updates = [compared for run in runs for compared in run.compared if compared.name == UPDATE]
    yield Row(quantity="predicted update", unit="s", samples=[update.predicted_s for update in updates], **labels)
    yield Row(quantity="measured update", unit="s", samples=[update.measured_s for update in updates], **labels)
    errors = [update.predicted_s / update.measured_s - 1 for update in updates]
    yield Row(quantity="prediction error", unit="share", samples=errors, **labels)
    assert runs[0].plan is not None
    bound = lower_bound(runs[0].plan.workload, runs[0].setting, profile)
    ratios = [step_s / bound.seconds for step_s in all_samples(runs, "step_s")]
    yield Row(quantity="update / lower bound", unit="times", samples=ratios, **labels)


def _variants(profile: Path, unit_size: int) -> list[Variant]:
    """Return the planned variant, then one variant per simple placement, in units of that size."""
    variants = [planned("planned", profile=str(profile), **NO_OVERLAP)]
    for name, block in PLACEMENTS.items():
        variants.append(ours(name, **block, profile=str(profile), unit_size=unit_size, **NO_OVERLAP))
    return variants
