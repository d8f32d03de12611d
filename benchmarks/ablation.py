"""What does each part gain by itself? One thing more is switched on from arm to arm.

Asynchronous gradients, which are DeepSpeed's default; our schedule, with stock's kernel; the fused kernel; streaming,
where the plan finds that it pays; overlap with backward; overlap with the next forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from deepspeed.accelerator import get_accelerator

from benchmarks.harness import arms
from benchmarks.harness.picture import Bars
from benchmarks.harness.rows import Row
from benchmarks.harness.sizes import effort, usual
from benchmarks.harness.turn_rows import faster, of_arm, phases, rows_of
from benchmarks.harness.turns import Turn, take_turns

GAIN = "iterations faster than the arm before"

PICTURE = Bars(GAIN, ("forward", "backward", "update exposed"))


def measure(*, quick: bool) -> Iterator[Row]:
    setting = usual(quick=quick)
    ran = take_turns(list(arms.ABLATION.values()), setting, effort(quick=quick))
    yield from rows_of(ran, phases)
    for (_, before), (switch, after) in pairwise(arms.ABLATION.items()):
        of = of_arm(f"+ {switch}", setting)
        if before.name in ran.failed or after.name in ran.failed:
            continue
        if (reason := _nothing_to_gain(switch, ran.turns[after.name][0])) is not None:
            yield Row(quantity=GAIN, waived=reason, **of)
            continue
        gains = faster(ran.turns[after.name], ran.turns[before.name], "iteration_s")
        yield Row(quantity=GAIN, unit="times", samples=gains, **of)


def _nothing_to_gain(switch: str, turn: Turn) -> str | None:
    """Why both arms do the same on this machine."""
    if switch == "asynchronous gradients" and get_accelerator().device_name() != "cuda":
        return "nothing is page-locked where the CPU trains"
    if switch in ("streaming", "overlap with backward") and not turn.streams:
        return "the plan updates all on the CPU"
    return None
