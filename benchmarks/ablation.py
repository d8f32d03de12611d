"""What does each part gain by itself? One thing more is switched on from arm to arm.

Asynchronous gradients, which are DeepSpeed's default; our schedule, with stock's kernel; the fused kernel; streaming,
where the plan finds that it pays; overlap with backward; overlap with the next forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from benchmarks.harness import arms
from benchmarks.harness.picture import Bars
from benchmarks.harness.rows import Row
from benchmarks.harness.sizes import effort, usual
from benchmarks.harness.turn_rows import failures, faster, of_arm, phases, same_bits, what_it_is
from benchmarks.harness.turns import take_turns

GAIN = "iterations faster than the arm before"

PICTURE = Bars(GAIN, ("forward", "backward", "update exposed"))


def measure(*, quick: bool) -> Iterator[Row]:
    setting = usual(quick=quick)
    ran = take_turns(arms.ABLATION, setting, effort(quick=quick))
    yield from failures(ran.failed, setting)
    stock = ran.turns[arms.STOCK.name]
    for name, turns in ran.turns.items():
        of = of_arm(name, setting)
        yield from phases(turns, stock, **of)
        yield same_bits(turns, stock, **of)
        yield from what_it_is(turns, **of)
    for before, after in pairwise(ran.turns.values()):
        gains = faster(after, before, "iteration_s")
        yield Row(quantity=GAIN, unit="times", samples=gains, **of_arm(after[0].arm.name, setting))
