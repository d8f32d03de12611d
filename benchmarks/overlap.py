"""How much of the update is seen: with overlap off, in backward only, in forward only, both; beside stock offload?

The same share of the parameters is streamed in all of ours, so that there is something to prefetch in backward.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.harness.arms import STOCK, ours
from benchmarks.harness.picture import Bars
from benchmarks.harness.rows import Row
from benchmarks.harness.sizes import effort, overlapping
from benchmarks.harness.turn_rows import phases, rows_of
from benchmarks.harness.turns import take_turns

STREAMED = {"placement": "fraction", "gpu_fraction": 0.7}
ARMS = (
    STOCK,
    ours("no overlap", **STREAMED, overlap_backward=False, overlap_forward=False),
    ours("backward", **STREAMED, overlap_backward=True, overlap_forward=False),
    ours("forward", **STREAMED, overlap_backward=False, overlap_forward=True),
    ours("both", **STREAMED, overlap_backward=True, overlap_forward=True),
)

PICTURE = Bars(("update exposed", "update hidden"), "iteration")


def measure(*, quick: bool) -> Iterator[Row]:
    setting = overlapping(quick=quick)
    yield from rows_of(take_turns(ARMS, setting, effort(quick=quick)), phases)
