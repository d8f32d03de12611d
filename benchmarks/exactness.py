"""Are the losses and the weights stock's, over hundreds of steps on real text? And how fast was that?

All arms that claim Adam's bits, and those that do not, for whom the largest difference of a loss says how far they go.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial

from benchmarks.harness import arms
from benchmarks.harness.picture import Bars
from benchmarks.harness.rows import Row
from benchmarks.harness.sizes import exact
from benchmarks.harness.turns import take_turn

STEPS = 200

PICTURE = Bars("largest difference of a loss", "last loss", "iteration")


def measure(*, quick: bool) -> Iterator[Row]:
    setting = exact(quick=quick)
    steps = 10 if quick else STEPS
    about = {**asdict(setting), "parameters": setting.parameters, "steps": steps}
    stock = take_turn(arms.STOCK, setting, iterations=steps, warm_up=1)
    compared = {arm.name: arm for arm in (*arms.ABLATION, *arms.competitors(setting), arms.NO_OFFLOAD)}.values()
    for arm in compared:
        row = partial(Row, arm=arm.name, setting=about)
        if (reason := arm.waived()) is not None:
            yield row(quantity="stock's losses", waived=reason)
            continue
        turn = take_turn(arm, setting, iterations=steps, warm_up=1)
        largest = max(abs(its - theirs) for its, theirs in zip(turn.losses, stock.losses, strict=True))
        yield Row(
            arm=arm.name, quantity="stock's losses", said=turn.losses == stock.losses, claimed=arm.exact, setting=about
        )
        yield row(quantity="largest difference of a loss", unit="nats", samples=[largest])
        yield row(quantity="hash of the weights", said=turn.digest)
        yield Row(
            arm=arm.name, quantity="stock's weights", said=turn.digest == stock.digest, claimed=arm.exact, setting=about
        )
        yield row(quantity="claims stock's bits", said=arm.exact)
        yield row(quantity="last loss", unit="nats", samples=[turn.losses[-1]])
        yield row(quantity="iteration", unit="s", samples=turn.iteration_s)
