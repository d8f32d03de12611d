"""Record the runs of the demo, compare them bit by bit, and print the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.schedule import format_grid


@dataclass
class DemoRecord:
    """The measurements of one variant, with one entry per step.

    ``step_s`` is the duration of a step, and ``update_s`` the part of it that ``engine.step()`` took, in seconds.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    update_s: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Comparison:
    """The result of comparing one quantity between two variants."""

    quantity: str
    compared: int
    """The numbers that were compared."""
    differing: int
    """The numbers that differ in at least one bit."""


@dataclass(frozen=True, kw_only=True)
class DemoRun:
    """The results of the demo.

    ``timed`` selects the steps that are timed, and ``numel`` is the number of the model's parameters.
    ``predicted_and_measured`` is the plugin's own comparison, with one row for the update and one per kind of action.
    The names with ``overlapped_`` belong to a third variant, whose update overlaps with the next forward.
    """

    stock: DemoRecord
    plugin: DemoRecord
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
        """Return whether no number differs between stock and either variant of the plugin."""
        return all(comparison.differing == 0 for comparison in (*self.comparisons, *self.overlapped_comparisons))


def compare(
    stock: DemoRecord,
    plugin: DemoRecord,
    stock_states: Mapping[str, list[Tensor]],
    plugin_states: Mapping[str, list[Tensor]],
) -> list[Comparison]:
    """Compare losses and gradient norms of every step, and every element of the states after the last step."""
    pairs = {
        "losses": (_as_tensors(stock.losses), _as_tensors(plugin.losses)),
        "gradient norms": (_as_tensors(stock.norms), _as_tensors(plugin.norms)),
        **{name: (tensors, plugin_states[name]) for name, tensors in stock_states.items()},
    }
    return [
        Comparison(
            quantity,
            compared=sum(tensor.numel() for tensor in expected),
            differing=sum(_differing(*pair) for pair in zip(expected, found, strict=True)),
        )
        for quantity, (expected, found) in pairs.items()
    ]


def _as_tensors(numbers: list[float]) -> list[Tensor]:
    return [torch.tensor(numbers, dtype=torch.float64)]


def _differing(expected: Tensor, found: Tensor) -> int:
    """Return how many elements differ in at least one bit."""
    # Compare as integers: 0.0 == -0.0 although their bits differ, and nan != nan although their bits may be equal.
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[expected.element_size()]
    return int((expected.view(bits) != found.view(bits)).sum())


def print_report(run: DemoRun, console: Console) -> None:
    """Print the plan, the comparison with stock, and the predictions of the performance model."""

    def print_text(text: str, soft_wrap: bool = False) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=soft_wrap)

    # Do not wrap the grid: its lines must stay aligned.
    print_text(f"\nThe plan that ran: {run.plan}\n{format_grid(run.plan.schedule)}\n", soft_wrap=True)
    console.print(_table(run))
    print_text(
        f"update = engine.step(): gradient norm, clipping, Adam, rounding to bf16. step = forward, backward, update. "
        f"Median (20th to 80th percentile) of {len(run.stock.step_s[run.timed])} steps; a ratio is that of the two "
        f"variants in one step. The first {run.timed.start} steps are not timed."
    )
    if run.accelerator == "cpu":
        print_text(
            "The accelerator of this run is the CPU itself: streaming only adds copies there, so no speed-up is to be "
            "expected. This run checks exactness."
        )
    print_text("The performance model's prediction, from a profile of this machine, and the plugin's measurement:")
    for row in run.predicted_and_measured:
        print_text(f"  {row}")
    differing = sum(comparison.differing for comparison in run.overlapped_comparisons)
    print_text(
        "With the update overlapped with the next forward (the default), trained alone: "
        f"{'all bits are equal to stock' if differing == 0 else f'{differing:,} numbers differ from stock'}. "
        "The exposed part of the update:"
    )
    for row in run.overlapped_predicted_and_measured:
        print_text(f"  {row}")


def _table(run: DemoRun) -> Table:
    stock, plugin = run.stock, run.plugin
    table = Table(title=f"{run.numel:,} parameters, {len(stock.losses)} steps of each variant")
    table.add_column("")
    for heading in ("stock", "plugin", "stock / plugin"):
        table.add_column(heading, justify="right")
    table.add_row("first loss", f"{stock.losses[0]:.6f}", f"{plugin.losses[0]:.6f}")
    table.add_row("last loss", f"{stock.losses[-1]:.6f}", f"{plugin.losses[-1]:.6f}")
    table.add_section()
    for label, stock_s, plugin_s, digits in (
        ("update, ms", stock.update_s[run.timed], plugin.update_s[run.timed], 1),
        ("step, ms", stock.step_s[run.timed], plugin.step_s[run.timed], 0),
    ):
        spreads_ms = [_spread([second * 1e3 for second in seconds], digits) for seconds in (stock_s, plugin_s)]
        ratios = [stock_step_s / plugin_step_s for stock_step_s, plugin_step_s in zip(stock_s, plugin_s, strict=True)]
        table.add_row(label, *spreads_ms, _spread(ratios, 2))
    table.add_section()
    for comparison in run.comparisons:
        compared = f"{comparison.compared:,}"
        verdict = f"[red]{comparison.differing:,} differ" if comparison.differing else "[green]bit-identical"
        table.add_row(comparison.quantity, compared, compared, verdict)
    return table


def _spread(values: Sequence[float], digits: int) -> str:
    """Format the median and, in brackets, the 20th and the 80th percentile."""
    p20, *_, p80 = quantiles(values, n=5, method="inclusive")
    return f"{median(values):.{digits}f} ({p20:.{digits}f}-{p80:.{digits}f})"
