"""What does the plugin cost where nothing can be gained: a model of one million parameters, all updated on the CPU?

As it is, with both overlaps; and with the update done when ``step()`` returns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial

from benchmarks import arms
from benchmarks.arms import ours
from benchmarks.rows import Row
from benchmarks.turns import Setting, Turn, take_turn, take_turns

SETTING = Setting(layers=5, width=128, context=128, micro_batch=4)
"""1.07 M parameters."""


def measure(*, quick: bool) -> Iterator[Row]:
    compared = (arms.STOCK, ours("ours", placement="cpu"), arms.ALL_CPU)
    about = {**asdict(SETTING), "parameters": SETTING.parameters}
    iterations, rounds = (5, 2) if quick else (40, 6)
    ran: dict[str, list[Turn]] = {arm.name: [] for arm in compared}
    for turn in take_turns(compared, rounds, partial(take_turn, setting=SETTING, iterations=iterations)):
        ran[turn.arm.name].append(turn)
    stock = ran[arms.STOCK.name]
    for name, turns in ran.items():
        seconds = [its for turn in turns for its in turn.iteration_s]
        yield Row(arm=name, quantity="iteration", unit="s", samples=seconds, setting=about)
        # Iterations are milliseconds: turns are compared by their medians.
        ratios = [turn.median_s / other.median_s for turn, other in zip(turns, stock, strict=True)]
        yield Row(arm=name, quantity="iteration over stock's", unit="times", samples=ratios, setting=about)
        same = all(turn.same_bits_as(stock[0]) for turn in turns)
        yield Row(arm=name, quantity="stock's bits", said=same, claimed=True, setting=about)
