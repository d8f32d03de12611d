"""Answer the first question of a reader of the results: how much faster is an iteration, and at which sizes?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.harness.rows import EMULATED, format_row, format_with_spread
from benchmarks.harness.targets import (
    BIT_IDENTICAL,
    COST_SHARE,
    EMULATED_COST_SHARE,
    EMULATED_SPEEDUP,
    ITERATION_SPEEDUP,
    RETAINED,
)
from benchmarks.harness.variants import OURS_DEFAULT, STOCK

Rows = list[dict[str, Any]]

HEAD = (
    "how",
    "machine",
    "model",
    "micro-batch",
    "iteration, stock",
    "iteration, plugin",
    "speed-up",
    COST_SHARE,
    RETAINED,
    "same bits",
)


@dataclass(frozen=True, kw_only=True)
class SpeedUp:
    """The median iterations of stock and of the plugin in one setting, as text, and their ratio."""

    how: str
    machine: str
    model: str
    micro_batch: str
    stock: str
    plugin: str
    ratio: float
    ratio_shown: str
    cost: str
    retained: str
    same_bits: str

    @property
    def setting(self) -> tuple[str, ...]:
        """Return the cells that describe the setting."""
        return self.how, self.machine, self.model, self.micro_batch

    @property
    def cells(self) -> tuple[str, ...]:
        """Return the cells of the line, in the order of ``HEAD``."""
        return *self.setting, self.stock, self.plugin, self.ratio_shown, self.cost, self.retained, self.same_bits


@dataclass(frozen=True, kw_only=True)
class ComparedBenchmark:
    """A benchmark that compares the plugin's default with stock: the names of its rows, and how its machine ran.

    ``speedup`` and ``cost`` are the quantities of the ratios that were measured in turns. Without a row of ``speedup``,
    the ratio of the medians counts.
    """

    benchmark: str
    plugin: str
    iteration: str
    speedup: str
    cost: str
    how: str


COMPARISONS = (
    ComparedBenchmark(
        benchmark="training_step",
        plugin=OURS_DEFAULT.name,
        iteration="iteration",
        speedup=ITERATION_SPEEDUP,
        cost=COST_SHARE,
        how="measured",
    ),
    ComparedBenchmark(
        benchmark="emulated",
        plugin="planned, overlap",
        iteration=f"{EMULATED} iteration",
        speedup=EMULATED_SPEEDUP,
        cost=EMULATED_COST_SHARE,
        how=EMULATED,
    ),
)


def headline(runs_by_benchmark: Mapping[str, Sequence[Rows]]) -> list[SpeedUp]:
    """Return the speed-up of each machine, model and micro-batch, those that were measured on a GPU first."""
    found: dict[tuple[str, ...], SpeedUp] = {}
    for comparison in COMPARISONS:
        for run in runs_by_benchmark[comparison.benchmark]:
            for speed_up in _speed_ups(comparison, run):
                # Settings that differ in DeepSpeed's sub-groups alone are one line: the planner cuts units of its own.
                found.setdefault(speed_up.setting, speed_up)
    return sorted(found.values(), key=lambda speed_up: not speed_up.how.endswith("GPU"))


def _speed_ups(comparison: ComparedBenchmark, run: Rows) -> Iterator[SpeedUp]:
    measured = [row for row in run if "waived" not in row]
    for stock in measured:
        if (stock["variant"], stock["quantity"]) != (STOCK.name, comparison.iteration):
            continue
        same = (row for row in measured if row["setting"] == stock["setting"] and row["variant"] == comparison.plugin)
        found = {row["quantity"]: row for row in same}
        if comparison.iteration in found:
            yield _speed_up(comparison, stock, found)


def _speed_up(comparison: ComparedBenchmark, stock: Mapping[str, Any], found: Mapping[str, Any]) -> SpeedUp:
    plugin, setting = found[comparison.iteration], stock["setting"]
    ratio = stock["median"] / plugin["median"]
    shown = f"{ratio:.3g}x"
    if comparison.speedup in found:
        ratio = found[comparison.speedup]["median"]
        shown = format_with_spread(found[comparison.speedup])
    accumulation = setting.get("accumulation", 1)
    how = (
        comparison.how
        if comparison.how == EMULATED
        else f"{comparison.how} on {'the CPU' if stock['gpu'] is None else 'a GPU'}"
    )
    return SpeedUp(
        how=how,
        machine=setting.get("machine", stock["gpu"] or f"{stock['cpu']}, {stock['cores']} cores, no GPU").removeprefix(
            f"{EMULATED} "
        ),
        model=setting.get("model", f"{setting['parameters'] / 1e6:,.0f} M parameters"),
        micro_batch=f"{setting['micro_batch']}" + (f", accumulation {accumulation}" if accumulation > 1 else ""),
        stock=format_row(stock)[0],
        plugin=format_row(plugin)[0],
        ratio=ratio,
        ratio_shown=shown,
        cost=_ratio(found, comparison.cost),
        retained=_ratio(found, RETAINED),
        same_bits=_same_bits(found),
    )


def _ratio(found: Mapping[str, Any], quantity: str) -> str:
    return format_with_spread(found[quantity]) if quantity in found else "not measured"


def _same_bits(found: Mapping[str, Any]) -> str:
    """Return whether the plugin had stock's bits in these rows, or why that is not known."""
    compared = [row["value"] for quantity, row in found.items() if quantity.startswith(BIT_IDENTICAL)]
    if not compared:
        return "not compared"
    return ("yes" if compared[0] else "no") if isinstance(compared[0], bool) else compared[0]


def summary(speed_ups: Sequence[SpeedUp]) -> str:
    """Return one sentence per way of measuring, with the range of its speed-ups and their median."""
    sentences = []
    for how in dict.fromkeys(speed_up.how for speed_up in speed_ups):
        ratios = [speed_up.ratio for speed_up in speed_ups if speed_up.how == how]
        where = "On EMULATED GPUs" if how == EMULATED else f"As {how}"
        if len(ratios) == 1:
            sentences.append(
                f"{where}, an iteration is {ratios[0]:.2f} times as fast as with stock DeepSpeed, in one setting."
            )
            continue
        sentences.append(
            f"{where}, an iteration is {min(ratios):.2f} to {max(ratios):.2f} times as fast as with stock DeepSpeed, "
            f"{median(ratios):.2f} times in the median of {len(ratios)} settings."
        )
    return " ".join(sentences)
