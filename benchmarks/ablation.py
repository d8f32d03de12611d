"""How much speedup does each part of the plugin add? Each variant switches on one more part than the variant before.

The parts are asynchronous gradients, which are DeepSpeed's default; our schedule, with stock's kernel; the fused
kernel; streaming, if the plan finds that it pays off; overlap with backward; overlap with the next forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from benchmarks.harness import variants
from benchmarks.harness.interleaved_runs import EngineRun, run_interleaved
from benchmarks.harness.rows import Row
from benchmarks.harness.run_rows import labels_of, phase_rows, rows_of_runs, speedups
from benchmarks.harness.setting import default_setting, repetitions, trains_on_gpu
from perf_model.schedule.placement import Placement

GAIN = "iteration speedup over the previous variant"


def measure(*, quick: bool) -> Iterator[Row]:
    """Yield the phases of each variant, then the gain of each part."""
    setting = default_setting(quick=quick)
    runs = run_interleaved(list(variants.ABLATION.values()), setting, repetitions(quick=quick))
    yield from rows_of_runs(runs, phase_rows)
    for (_, before), (part, after) in pairwise(variants.ABLATION.items()):
        labels = labels_of(f"+ {part}", setting)
        if before.name in runs.errors or after.name in runs.errors:
            continue
        if (reason := _no_gain_reason(part, runs.completed[after.name][0])) is not None:
            yield Row(quantity=GAIN, waived=reason, **labels)
            continue
        gains = speedups(runs.completed[after.name], runs.completed[before.name], "iteration_s")
        yield Row(quantity=GAIN, unit="times", samples=gains, **labels)


def _no_gain_reason(part: str, run: EngineRun) -> str | None:
    """Return why both variants do the same on this machine, or None if they differ."""
    if part == "asynchronous gradients" and not trains_on_gpu():
        return "nothing is pinned if the CPU trains"
    placements = set() if run.plan is None else set(run.plan.placements)
    if part in ("streaming", "overlap with backward") and placements <= {Placement.CPU}:
        return "the plan updates everything on the CPU"
    return None
