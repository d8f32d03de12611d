"""How much of the update is seen: with overlap off, in backward only, in forward only, both; beside stock offload?

The same share of the parameters is streamed in all of ours, so that there is something to prefetch in backward.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.arms import STOCK, ours
from benchmarks.rows import Row
from benchmarks.sizes import overlapping
from benchmarks.turn_rows import all_of, exposed_and_hidden, of_arm, same_bits, what_it_is
from benchmarks.turns import take_turns

STREAMED = {"placement": "fraction", "gpu_fraction": 0.7}
ARMS = (
    STOCK,
    ours("no overlap", **STREAMED, overlap_backward=False, overlap_forward=False),
    ours("backward", **STREAMED, overlap_backward=True, overlap_forward=False),
    ours("forward", **STREAMED, overlap_backward=False, overlap_forward=True),
    ours("both", **STREAMED, overlap_backward=True, overlap_forward=True),
)


def measure(*, quick: bool) -> Iterator[Row]:
    setting = overlapping(quick=quick)
    iterations, rounds = (2, 1) if quick else (5, 2)
    ran = take_turns(ARMS, setting, iterations=iterations, rounds=rounds)
    stock = ran[STOCK.name]
    for name, turns in ran.items():
        of = of_arm(name, setting)
        yield from exposed_and_hidden(turns, **of)
        yield Row(quantity="iteration", unit="s", samples=all_of(turns, "iteration_s"), **of)
        ratios = [other.median_s / turn.median_s for other, turn in zip(stock, turns, strict=True)]
        yield Row(quantity="iterations faster than stock", unit="times", samples=ratios, **of)
        yield same_bits(turns, stock, **of)
        yield from what_it_is(turns, **of)
