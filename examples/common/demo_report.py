"""Show the steps of the demo, compare its runs bit by bit, and build its tables."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from perf_model.units import seconds

BUSY_SHARE = 0.05
"""The share of an iteration by which this machine may be behind the emulated one before its seconds are doubtful."""


class DemoSteps:
    """The steps of the demo. Each is announced when it starts, and followed by the seconds that it took."""

    def __init__(self, console: Console, count: int) -> None:
        self._console, self._count, self._number = console, count, 0
        self._start_s = time.perf_counter()

    @contextmanager
    def step(self, text: str) -> Iterator[None]:
        """Announce a step, and print its seconds and those since the start when the context ends."""
        self._number += 1
        start_s = time.perf_counter()
        self._console.print(f"[bold]Step {self._number} of {self._count}[/bold]  {text}")
        with self._console.status("running"):
            yield
        end_s = time.perf_counter()
        self._console.print(f"[dim]took {end_s - start_s:.1f} s, {end_s - self._start_s:.1f} s since the start[/dim]")


@dataclass(frozen=True, kw_only=True)
class DemoRecord:
    """The losses and gradient norms of every step, and the weights and optimizer states after the last one."""

    losses: Sequence[float]
    norms: Sequence[float]
    states: Mapping[str, Sequence[Tensor]]


@dataclass(frozen=True)
class Comparison:
    """The result of comparing one quantity between two variants."""

    quantity: str
    compared: int
    """The numbers that were compared."""
    differing: int
    """The numbers that differ in at least one bit."""


def compare(stock: DemoRecord, plugin: DemoRecord) -> list[Comparison]:
    """Compare losses and gradient norms of every step, and every element of the states after the last step."""
    pairs = {
        "losses": (_as_tensors(stock.losses), _as_tensors(plugin.losses)),
        "gradient norms": (_as_tensors(stock.norms), _as_tensors(plugin.norms)),
        **{name: (tensors, plugin.states[name]) for name, tensors in stock.states.items()},
    }
    return [
        Comparison(
            quantity,
            compared=sum(tensor.numel() for tensor in expected),
            differing=sum(_differing(*pair) for pair in zip(expected, found, strict=True)),
        )
        for quantity, (expected, found) in pairs.items()
    ]


def _as_tensors(numbers: Sequence[float]) -> list[Tensor]:
    return [torch.tensor(numbers, dtype=torch.float64)]


def _differing(expected: Tensor, found: Tensor) -> int:
    """Return how many elements differ in at least one bit."""
    # Compare as integers: 0.0 == -0.0 although their bits differ, and nan != nan although their bits may be equal.
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[expected.element_size()]
    return int((expected.view(bits) != found.view(bits)).sum())


def exactness_table(comparisons: Sequence[Comparison], steps: int) -> Table:
    """Return the table of the comparisons after ``steps`` steps of each variant."""
    table = Table(title=f"{steps} steps with stock and with the plugin, on the CPU")
    for heading in ("", "compared", "plugin against stock"):
        table.add_column(heading, justify="right" if heading == "compared" else "left")
    for comparison in comparisons:
        verdict = f"[red]{comparison.differing:,} differ" if comparison.differing else "[green]bit-identical"
        table.add_row(comparison.quantity, f"{comparison.compared:,}", verdict)
    return table


def speed_table(results: Mapping[str, Any]) -> Table:
    """Return the table of the EMULATED run, from the results of ``benchmarks.emulated.demonstration``."""
    stock, plugin = results["arms"]["stock"], results["arms"]["plugin"]
    table = Table(title=f"EMULATED: {results['model']} on {results['machine']}, micro-batch 1")
    for heading in ("", "stock", "plugin", "stock / plugin"):
        table.add_column(heading, justify="right" if heading else "left")
    for label, key in (("iteration", "iteration_s"), ("of which the update is exposed", "exposed_s")):
        stock_s, plugin_s = median(stock[key]), median(plugin[key])
        table.add_row(label, seconds(stock_s), seconds(plugin_s), f"{stock_s / plugin_s:.1f}x")
    verdict = "[green]bit-identical" if results["bit_identical"] else "[red]differ"
    table.add_row("losses and fp32 weights", "", verdict, "")
    return table


def explanation(results: Mapping[str, Any]) -> list[str]:
    """Return the sentences below ``speed_table``: the meaning of EMULATED, the plan, and the lag of this machine."""
    return [
        f"EMULATED, no GPU was measured: a GPT with {results['small_model']:,} parameters trains for real on a GPU in "
        f"software, and copies, kernels and updates take the time of {results['model']} on {results['machine']}, whose "
        f"rates are those of a preset. States may take {results['free_gb']:.0f} GB of each GPU, which training leaves.",
        f"The plan that ran: {results['plan']}.",
        lag_sentence(results),
    ]


def lag_sentence(results: Mapping[str, Any]) -> str:
    """Return whether this machine was too busy for the EMULATED seconds.

    The lag of the plugin's iterations shows it. With stock, the same threads are late in every iteration without making
    it longer, so that iterations of different lengths show it instead.
    """
    stock_s, plugin_s = (median(results["arms"][name]["iteration_s"]) for name in ("stock", "plugin"))
    lag_s, stocks_s = max(results["lag_s"]), results["arms"]["stock"]["iteration_s"]
    spread_s = max(stocks_s) - min(stocks_s)
    found = (
        f"with the plugin it was at most {seconds(lag_s)} behind the emulated one in an iteration, and stock's "
        f"iterations differ by {seconds(spread_s)}"
    )
    if lag_s > BUSY_SHARE * plugin_s or spread_s > BUSY_SHARE * stock_s:
        return (
            f"[red]This machine was too busy[/red] for EMULATED seconds: {found}. Repeat the demo while nothing else "
            f"runs."
        )
    return f"This machine was fast enough for EMULATED seconds: {found}."
