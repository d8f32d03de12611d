"""Answer the first question of a reader of the results: how much faster is an iteration, and at which sizes?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.harness.rows import EMULATED, format_row
from benchmarks.harness.targets import EMULATED_SPEEDUP, ITERATION_SPEEDUP
from benchmarks.harness.variants import OURS_DEFAULT

Rows = list[dict[str, Any]]

MEASURED_FROM = 4
"""The position of the first column of ``HEAD`` that was measured; the columns before it describe the setting."""

HEAD = ("how", "machine", "model", "micro-batch", "iteration, stock", "iteration, plugin", "speed-up")


@dataclass(frozen=True, kw_only=True)
class ComparedBenchmark:
    """A benchmark that compares the plugin's default with stock: the names of its rows, and how its machine ran.

    ``speedup`` is the quantity of the ratios that were measured in turns. Without such a row, the ratio is that of the
    medians.
    """

    benchmark: str
    plugin: str
    iteration: str
    speedup: str
    how: str


COMPARISONS = (
    ComparedBenchmark(
        benchmark="training_step",
        plugin=OURS_DEFAULT.name,
        iteration="iteration",
        speedup=ITERATION_SPEEDUP,
        how="measured",
    ),
    ComparedBenchmark(
        benchmark="emulated",
        plugin="planned, overlap",
        iteration=f"{EMULATED} iteration",
        speedup=EMULATED_SPEEDUP,
        how=EMULATED,
    ),
)


def headline(runs_by_benchmark: Mapping[str, Sequence[Rows]]) -> list[list[str]]:
    """Return the lines of the table with the columns ``HEAD``: one for each machine, model and micro-batch."""
    lines: dict[tuple[str, ...], list[str]] = {}
    for comparison in COMPARISONS:
        for run in runs_by_benchmark[comparison.benchmark]:
            for line in _lines(comparison, run):
                # Settings that differ in DeepSpeed's sub-groups alone are one line: the planner cuts units of its own.
                lines.setdefault(tuple(line[:MEASURED_FROM]), line)
    return list(lines.values())


def _lines(comparison: ComparedBenchmark, run: Rows) -> Iterator[list[str]]:
    measured = [row for row in run if "waived" not in row]
    for stock in measured:
        if (stock["variant"], stock["quantity"]) != ("stock", comparison.iteration):
            continue
        same = (row for row in measured if row["setting"] == stock["setting"] and row["variant"] == comparison.plugin)
        found = {row["quantity"]: row for row in same}
        if comparison.iteration in found:
            yield _line(comparison, stock, found)


def _line(comparison: ComparedBenchmark, stock: Mapping[str, Any], found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    ours, setting = found[comparison.iteration], stock["setting"]
    if comparison.speedup in found:
        speedup = "{} ({})".format(*format_row(found[comparison.speedup]))
    else:
        speedup = f"{stock['median'] / ours['median']:.3g}x"
    machine = setting.get("machine", stock["gpu"] or f"{stock['cpu']}, {stock['cores']} cores, no GPU")
    accumulation = setting.get("accumulation", 1)
    return [
        comparison.how,
        machine.removeprefix(f"{EMULATED} "),
        setting.get("model", f"{setting['parameters'] / 1e6:,.0f} M parameters"),
        f"{setting['micro_batch']}" + (f", accumulation {accumulation}" if accumulation > 1 else ""),
        format_row(stock)[0],
        format_row(ours)[0],
        speedup,
    ]


def summary(lines: Sequence[Sequence[str]]) -> str:
    """Return one sentence per way of measuring, with the range of its speed-ups and their median."""
    sentences = []
    for how in dict.fromkeys(line[0] for line in lines):
        ratios = [float(line[-1].split("x")[0]) for line in lines if line[0] == how]
        where = "On EMULATED GPUs" if how == EMULATED else "As measured"
        sentences.append(
            f"{where}, an iteration is {min(ratios):.2f} to {max(ratios):.2f} times as fast as with stock DeepSpeed, "
            f"{median(ratios):.2f} times in the median of {len(ratios)} settings."
        )
    return " ".join(sentences)
