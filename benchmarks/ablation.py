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
from benchmarks.harness.turn_rows import faster, of_arm, phases, rows_of
from benchmarks.harness.turns import take_turns

GAIN = "iterations faster than the arm before"

PICTURE = Bars(GAIN, ("forward", "backward", "update exposed"))


def measure(*, quick: bool) -> Iterator[Row]:
    setting = usual(quick=quick)
    ran = take_turns(arms.ABLATION, setting, effort(quick=quick))
    yield from rows_of(ran, phases)
    for before, after in pairwise(ran.turns.values()):
        gains = faster(after, before, "iteration_s")
        yield Row(quantity=GAIN, unit="times", samples=gains, **of_arm(after[0].arm.name, setting))
