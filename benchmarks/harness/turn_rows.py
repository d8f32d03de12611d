"""What turns of engines say, as rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.harness.arms import STOCK, Arm
from benchmarks.harness.rows import Row
from benchmarks.harness.setting import Setting
from benchmarks.harness.turns import Ran, Turn


def of_arm(name: str, setting: Setting) -> dict[str, Any]:
    """What all its rows say."""
    return {"arm": name, "setting": {**asdict(setting), "parameters": setting.parameters}}


def waived(arms: Sequence[Arm], quantity: str, setting: Setting) -> Iterator[Row]:
    """Of the arms that cannot run here."""
    for arm in arms:
        if (reason := arm.waived(setting)) is not None:
            yield Row(quantity=quantity, waived=reason, **of_arm(arm.name, setting))


def running(arms: Sequence[Arm], setting: Setting) -> list[Arm]:
    return [arm for arm in arms if arm.waived(setting) is None]


def failures(failed: Mapping[str, str], setting: Setting) -> Iterator[Row]:
    """``failed``: what went wrong, by arm."""
    for name, why in failed.items():
        yield Row(quantity="ran to its end", said=False, claimed=True, **of_arm(name, setting))
        yield Row(quantity="failed by", said=why, **of_arm(name, setting))


def rows_of(ran: Ran, each: Callable[..., Iterable[Row]]) -> Iterator[Row]:
    """``each(turns, stock, **of)`` and what it was, of every arm that ran to its end; of the others what went wrong.
    Without stock, if it was to be there, nothing can be told of the others."""
    yield from failures(ran.failed, ran.setting)
    if STOCK.name in ran.failed:
        return
    stock = ran.turns.get(STOCK.name, [])
    for name, turns in ran.turns.items():
        of = of_arm(name, ran.setting)
        yield from each(turns, stock, **of)
        yield from what_it_is(turns, **of)


def all_of(turns: Sequence[Turn], name: str) -> list[float]:
    """The samples of all iterations."""
    return [its for turn in turns for its in getattr(turn, name)]


def faster(turns: Sequence[Turn], stock: Sequence[Turn], name: str) -> list[float]:
    """Stock's seconds over theirs, iteration by iteration of the same round."""
    return [theirs / its for theirs, its in zip(all_of(stock, name), all_of(turns, name), strict=True)]


def phases(turns: Sequence[Turn], stock: Sequence[Turn], **of: Any) -> Iterator[Row]:
    """Of an iteration, the whole, and whether its bits are stock's."""
    yield Row(quantity="forward", unit="s", samples=all_of(turns, "forward_s"), **of)
    yield Row(quantity="backward", unit="s", samples=all_of(turns, "backward_s"), **of)
    exposed_s = all_of(turns, "exposed_s")
    yield Row(quantity="update exposed", unit="s", samples=exposed_s, **of)
    shares = [its / theirs for its, theirs in zip(exposed_s, all_of(stock, "step_s"), strict=True)]
    yield Row(quantity="exposed, of stock's update", unit="share", samples=shares, **of)
    if hidden_s := all_of(turns, "hidden_s"):
        yield Row(quantity="update hidden", unit="s", samples=hidden_s, **of)
    yield Row(quantity="iteration", unit="s", samples=all_of(turns, "iteration_s"), **of)
    ratios = faster(turns, stock, "iteration_s")
    yield Row(quantity="iterations faster than stock", unit="times", samples=ratios, **of)
    yield same_bits(turns, stock, **of)


def same_bits(turns: Sequence[Turn], stock: Sequence[Turn], **of: Any) -> Row:
    """Attention's backward on a GPU adds in another order in every run: then stock has not its own bits, either."""
    if not all(turn.same_bits_as(stock[0]) for turn in stock):
        return Row(quantity="stock's bits", said="stock's own differ", **of)
    same = all(turn.same_bits_as(stock[0]) for turn in turns)
    return Row(quantity="stock's bits", said=same, claimed=turns[0].arm.exact, **of)


def what_it_is(turns: Sequence[Turn], **of: Any) -> Iterator[Row]:
    yield Row(quantity="is", said=turns[0].settings, **of)
    if turns[0].plan:
        yield Row(quantity="plan", said=turns[0].plan, **of)
