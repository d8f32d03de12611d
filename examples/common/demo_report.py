"""Compare the runs of the demo bit by bit, and build its tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from rich.table import Table
from torch import Tensor


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
        table.add_row(label, f"{stock_s:.2f} s", f"{plugin_s:.2f} s", f"{stock_s / plugin_s:.1f}x")
    verdict = "[green]bit-identical" if results["bit_identical"] else "[red]differ"
    table.add_row("losses and fp32 weights", "", verdict, "")
    return table
