"""How much of the update is exposed with overlap off, in backward only, in forward only, and in both?

All of our variants stream every second unit, so that there is something to prefetch in backward. Stock
offloading runs for comparison.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.harness.charts import Bars
from benchmarks.harness.interleaved_runs import run_interleaved
from benchmarks.harness.rows import Row
from benchmarks.harness.run_rows import phase_rows, rows_of_runs
from benchmarks.harness.sizes import overlap_setting, repetitions
from benchmarks.harness.variants import STOCK, ours

STREAMED = {"placement": "stride", "update_stride": 2}
VARIANTS = (
    STOCK,
    ours("no overlap", **STREAMED, overlap_backward=False, overlap_forward=False),
    ours("backward", **STREAMED, overlap_backward=True, overlap_forward=False),
    ours("forward", **STREAMED, overlap_backward=False, overlap_forward=True),
    ours("both", **STREAMED, overlap_backward=True, overlap_forward=True),
)

CHART = Bars(("update exposed", "update hidden"), "iteration")


def measure(*, quick: bool) -> Iterator[Row]:
    """Yield the phases of each variant."""
    setting = overlap_setting(quick=quick)
    yield from rows_of_runs(run_interleaved(VARIANTS, setting, repetitions(quick=quick)), phase_rows)
