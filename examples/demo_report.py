"""What the two arms of the demo did, and the table that compares them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.schedule import grid


@dataclass
class Record:
    """One arm; one entry a step. ``update_s`` is the part of ``step_s`` that ``engine.step()`` took."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    update_s: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Comparison:
    """So many numbers were compared between the arms, and so many of them differ in a bit."""

    what: str
    compared: int
    differing: int


@dataclass(frozen=True, kw_only=True)
class Run:
    """``timed`` are the steps whose seconds count; ``numel`` the model's parameters.

    ``predicted_and_measured``: the plugin's own comparison, one row for the update and one for each kind of action.
    ``overlapped_``: of a third arm, whose update goes on in the next forward.
    """

    stock: Record
    plugin: Record
    timed: slice
    comparisons: Sequence[Comparison]
    overlapped_comparisons: Sequence[Comparison]
    numel: int
    plan: UpdatePlan
    accelerator: str
    predicted_and_measured: Sequence[object]
    overlapped_predicted_and_measured: Sequence[object]

    @property
    def bit_identical(self) -> bool:
        return all(its.differing == 0 for its in (*self.comparisons, *self.overlapped_comparisons))


def compare(
    stock: Record, plugin: Record, stock_states: Mapping[str, list[Tensor]], plugin_states: Mapping[str, list[Tensor]]
) -> list[Comparison]:
    """Losses and gradient norms of every step, and every element of the states at the end."""
    pairs = {
        "losses": (_as_tensors(stock.losses), _as_tensors(plugin.losses)),
        "gradient norms": (_as_tensors(stock.norms), _as_tensors(plugin.norms)),
        **{what: (tensors, plugin_states[what]) for what, tensors in stock_states.items()},
    }
    return [
        Comparison(
            what,
            compared=sum(tensor.numel() for tensor in expected),
            differing=sum(_differing(*pair) for pair in zip(expected, found, strict=True)),
        )
        for what, (expected, found) in pairs.items()
    ]


def _as_tensors(numbers: list[float]) -> list[Tensor]:
    return [torch.tensor(numbers, dtype=torch.float64)]


def _differing(expected: Tensor, found: Tensor) -> int:
    # As integers: 0.0 == -0.0, whose bits differ, and nan != nan, whose bits may not.
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[expected.element_size()]
    return int((expected.view(bits) != found.view(bits)).sum())


def print_report(run: Run, console: Console) -> None:
    def say(text: str, soft_wrap: bool = False) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=soft_wrap)

    # The grid has a width of its own, that no terminal changes.
    say(f"\nThe plan that ran: {run.plan}\n{grid(run.plan.schedule)}\n", soft_wrap=True)
    console.print(_table(run))
    say(
        f"update = engine.step(): gradient norm, clipping, Adam, rounding to bf16. step = forward, backward, update. "
        f"Median (20th to 80th percentile) of {len(run.stock.step_s[run.timed])} steps; a ratio is of the two arms in "
        f"one step. Not timed: {run.timed.start} steps of warm-up."
    )
    if run.accelerator == "cpu":
        say(
            "The accelerator of this run is the CPU itself: streaming is pure extra copying there, and no gain in time "
            "is to be expected. This run is about exactness."
        )
    say("The performance model, from a profile of this machine, over the same steps as seen by the plugin:")
    for row in run.predicted_and_measured:
        say(f"  {row}")
    differing = sum(comparison.differing for comparison in run.overlapped_comparisons)
    say(
        "With the update going on in the next forward (the default), trained alone: "
        f"{'every bit as with stock' if differing == 0 else f'{differing:,} numbers differ from stock'}. "
        "Of the update, what forward did not hide:"
    )
    for row in run.overlapped_predicted_and_measured:
        say(f"  {row}")


def _table(run: Run) -> Table:
    stock, plugin = run.stock, run.plugin
    table = Table(title=f"{run.numel:,} parameters, {len(stock.losses)} steps of each arm")
    table.add_column("")
    for heading in ("stock", "plugin", "stock / plugin"):
        table.add_column(heading, justify="right")
    table.add_row("first loss", f"{stock.losses[0]:.6f}", f"{plugin.losses[0]:.6f}")
    table.add_row("last loss", f"{stock.losses[-1]:.6f}", f"{plugin.losses[-1]:.6f}")
    table.add_section()
    for what, stock_s, plugin_s, digits in (
        ("update, ms", stock.update_s[run.timed], plugin.update_s[run.timed], 1),
        ("step, ms", stock.step_s[run.timed], plugin.step_s[run.timed], 0),
    ):
        spreads_ms = [_spread([second * 1e3 for second in seconds], digits) for seconds in (stock_s, plugin_s)]
        ratios = [of_stock / of_plugin for of_stock, of_plugin in zip(stock_s, plugin_s, strict=True)]
        table.add_row(what, *spreads_ms, _spread(ratios, 2))
    table.add_section()
    for comparison in run.comparisons:
        compared = f"{comparison.compared:,}"
        verdict = f"[red]{comparison.differing:,} differ" if comparison.differing else "[green]bit-identical"
        table.add_row(comparison.what, compared, compared, verdict)
    return table


def _spread(values: Sequence[float], digits: int) -> str:
    """The median, and in brackets the 20th and the 80th percentile."""
    p20, *_, p80 = quantiles(values, n=5, method="inclusive")
    return f"{median(values):.{digits}f} ({p20:.{digits}f}-{p80:.{digits}f})"
