"""Plan for several numbers of GPUs and micro-batches, and show the plans as a table and as CSV."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterable
from itertools import product

from perf_model.cli.inputs import Inputs, read_inputs, writing
from perf_model.cli.plan_command import fixed_seconds
from perf_model.cli.screen import progress, show
from perf_model.prediction.memory import DoesNotFit
from perf_model.presets.comparison import comparison
from perf_model.schedule.placement import Placement
from perf_model.training_run.forecast import Infeasible
from perf_model.training_run.micro_batch import Overheads
from perf_model.training_run.model import ModelError
from perf_model.units import DIGITS, percent, seconds, significant

SweepRow = dict[str, str | int | float | None]

COLUMNS = (
    "world_size", "micro_batch", "cpu", "streamed", "resident", "unit_size", "update_s", "exposed_update_s",
    "iteration_s", "tokens_per_s", "mfu", "stock_iteration_s", "speed_up", "gpu_peak_bytes", "host_bytes", "why",
)  # fmt: skip

SHOWN = {
    "world_size": "GPUs", "micro_batch": "batch", "exposed_update_s": "exposed", "iteration_s": "iteration",
    "tokens_per_s": "tokens/s", "mfu": "MFU", "speed_up": "speed-up",
}  # fmt: skip

MOST_POINTS = 500
"""A point takes a second or two."""


def run(options: argparse.Namespace) -> int:
    """Print a row for each pair, write the CSV file, and return the exit code: 1 if nothing fits for any pair."""
    points = list(product(options.world_sizes, options.micro_batches))
    if len(points) > MOST_POINTS:
        rule = f"--world-sizes and --micro-batches: must make at most {MOST_POINTS} pairs, found {len(points):,}"
        raise ModelError(f"{rule}.\nGive fewer of them.")
    # An impossible pair is refused before the others are planned for, and rows are printed before writing can fail.
    with progress("Reading"):
        inputs = read_inputs(options, *points)
    print(_line(SHOWN.values()))
    rows: list[SweepRow] = []
    for each in inputs:
        with progress("Planning"):
            row = _row(each)
        rows.append(row)
        if row["why"] is None:
            print(_line(_cell(key, row[key]) for key in SHOWN), flush=True)
        else:
            print(f"{row['world_size']} GPUs, micro-batch {row['micro_batch']}: {row['why']}", flush=True)
    if fitting := [row for row in rows if row["why"] is None]:
        best = max(fitting, key=lambda row: float(row["tokens_per_s"] or 0))
        show(f"most tokens/s: {best['world_size']} GPUs, micro-batch {best['micro_batch']}")
    overheads = Overheads.from_profile(inputs[0].profile)
    legend = "exposed: exposed update time; speed-up: of an iteration, over the stock offload of DeepSpeed today"
    show(legend + (f"; {fixed_seconds(overheads)}" if overheads.step_s > 0 else ""))
    for sentences in dict.fromkeys(comparison(each.profile, each.job) for each in inputs):
        show(sentences)
    if options.csv is not None:
        with writing("--csv", options.csv), options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
    return 0 if fitting else 1


def _line(cells: Iterable[str]) -> str:
    return " ".join(f"{cell:>{max(6, len(title))}}" for cell, title in zip(cells, SHOWN.values(), strict=True))


def _row(inputs: Inputs) -> SweepRow:
    row: SweepRow = dict.fromkeys(COLUMNS)
    row.update(world_size=inputs.job.world_size, micro_batch=inputs.job.micro_batch)
    try:
        found = inputs.forecast()
    except DoesNotFit as error:
        return {**row, "why": error.rule}
    placements, stock = found.planned.plan.placements, found.baselines["stock"]
    return {
        **row,
        **{placement.value: placements.count(placement) for placement in Placement},
        **{key: value for key, value in found.predicted.to_json_dict().items() if key in COLUMNS},
        "unit_size": found.planned.unit_size,
        "stock_iteration_s": None if isinstance(stock, Infeasible) else stock.iteration_s,
        "speed_up": found.speed_up(found.predicted),
        "gpu_peak_bytes": found.memory.gpu_bytes,
        "host_bytes": found.memory.host_bytes,
    }


def _cell(column: str, value: str | int | float | None) -> str:
    if not isinstance(value, float):
        return "-" if value is None else str(value)
    if column == "mfu":
        return percent(value)
    if column == "speed_up":
        return f"{significant(value, DIGITS)}x"
    is_seconds = column.endswith("_s") and column != "tokens_per_s"
    return seconds(value, DIGITS) if is_seconds else significant(value, DIGITS)
