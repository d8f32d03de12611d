"""Are the losses and the weights stock's, over hundreds of steps on real text? And how fast was that?

All arms that claim Adam's bits, and those that do not, for whom the largest difference of a loss says how far they go.
Each has one turn: its speed stands beside its bits, and is compared by the other benchmarks.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.harness import arms
from benchmarks.harness.picture import Bars
from benchmarks.harness.rows import Row
from benchmarks.harness.sizes import exact
from benchmarks.harness.turn_rows import failures, of_arm, what_it_is
from benchmarks.harness.turns import attempt, take_turn

STEPS = 200

PICTURE = Bars("largest difference of a loss", "last loss", "iteration")


def measure(*, quick: bool) -> Iterator[Row]:
    _repeatable()
    setting = exact(quick=quick)
    steps = 10 if quick else STEPS
    stock = take_turn(arms.STOCK, setting, iterations=steps, warm_up=1)
    ours = (*arms.ABLATION.values(), arms.STREAMED_AND_OVERLAPPED)
    # Some stand in both.
    compared = {arm.name: arm for arm in (*ours, *arms.competitors(setting), arms.NO_OFFLOAD)}
    for arm in compared.values():
        of = of_arm(arm.name, setting)
        of["setting"]["steps"] = steps
        if (reason := arm.waived(setting)) is not None:
            yield Row(quantity="stock's losses", waived=reason, **of)
            continue
        turn = attempt(arm, setting, iterations=steps, warm_up=1)
        if isinstance(turn, str):
            yield from failures({arm.name: turn}, setting)
            continue
        claimed = arm.exact
        yield Row(quantity="stock's losses", said=turn.losses == stock.losses, claimed=claimed, **of)
        largest = max(abs(its - theirs) for its, theirs in zip(turn.losses, stock.losses, strict=True))
        yield Row(quantity="largest difference of a loss", unit="nats", samples=[largest], **of)
        yield Row(quantity="stock's weights", said=turn.digest == stock.digest, claimed=claimed, **of)
        yield Row(quantity="hash of the weights", said=turn.digest, **of)
        yield Row(quantity="claims stock's bits", said=claimed, **of)
        yield Row(quantity="last loss", unit="nats", samples=[turn.losses[-1]], **of)
        yield Row(quantity="iteration", unit="s", samples=turn.iteration_s, **of)
        yield from what_it_is([turn], **of)


def _repeatable() -> None:
    """On a GPU, attention's backward adds in another order in every run, and so would stock's own."""
    torch.use_deterministic_algorithms(True)
