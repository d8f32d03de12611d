"""What does the plugin cost where nothing can be gained: a model of one million parameters, all updated on the CPU?

As it is, with both overlaps; and with the update done when ``step()`` returns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.harness import arms
from benchmarks.harness.arms import ours
from benchmarks.harness.picture import Bars
from benchmarks.harness.rows import Row
from benchmarks.harness.setting import Setting
from benchmarks.harness.sizes import Effort
from benchmarks.harness.turn_rows import all_of, rows_of, same_bits
from benchmarks.harness.turns import Turn, take_turns

SETTING = Setting(layers=5, width=128, context=128, micro_batch=4)
"""1.07 M parameters."""

PICTURE = Bars("iteration", "iteration over stock's")


def measure(*, quick: bool) -> Iterator[Row]:
    compared = (arms.STOCK, ours("ours", placement="cpu"), arms.ALL_CPU)
    effort = Effort(iterations=5, rounds=2) if quick else Effort(iterations=40, rounds=6)
    yield from rows_of(take_turns(compared, SETTING, effort), _rows)


def _rows(turns: Sequence[Turn], stock: Sequence[Turn], **of: Any) -> Iterator[Row]:
    yield Row(quantity="iteration", unit="s", samples=all_of(turns, "iteration_s"), **of)
    # Iterations are milliseconds: turns are compared by their medians.
    ratios = [turn.median_s / other.median_s for turn, other in zip(turns, stock, strict=True)]
    yield Row(quantity="iteration over stock's", unit="times", samples=ratios, **of)
    yield same_bits(turns, stock, **of)
