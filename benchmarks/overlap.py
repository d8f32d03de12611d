"""How much of the update is seen: with overlap off, in backward only, in forward only, both; beside stock offload?

The same share of the parameters is streamed in all of ours, so that there is something to prefetch in backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial

from benchmarks.arms import STOCK, ours
from benchmarks.rows import Row
from benchmarks.sizes import overlapping
from benchmarks.turns import Turn, take_turn, take_turns

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
    about = {**asdict(setting), "parameters": setting.parameters}
    iterations, rounds = (2, 1) if quick else (5, 2)
    ran: dict[str, list[Turn]] = {arm.name: [] for arm in ARMS}
    for turn in take_turns(ARMS, rounds, partial(take_turn, setting=setting, iterations=iterations)):
        ran[turn.arm.name].append(turn)
    stock = ran[STOCK.name]
    for name, turns in ran.items():
        of = partial(Row, arm=name, setting=about)
        # Stock's is all seen.
        exposed_s = [its for turn in turns for its in turn.exposed_s or turn.step_s]
        yield of(quantity="update exposed", unit="s", samples=exposed_s)
        if hidden_s := [its for turn in turns for its in turn.hidden_s]:
            yield of(quantity="update hidden", unit="s", samples=hidden_s)
        yield of(quantity="iteration", unit="s", samples=[its for turn in turns for its in turn.iteration_s])
        ratios = [other.median_s / turn.median_s for other, turn in zip(stock, turns, strict=True)]
        yield of(quantity="iterations faster than stock", unit="times", samples=ratios)
        same = all(turn.same_bits_as(stock[0]) for turn in turns)
        yield of(quantity="stock's bits", said=same, claimed=True)
        yield of(quantity="is", said=turns[0].settings)
