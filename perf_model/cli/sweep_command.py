"""Plan for several numbers of GPUs and micro-batches, and show the plans as a table and as CSV."""

from __future__ import annotations

import argparse
import csv
from itertools import product
from pathlib import Path

from perf_model.cli.inputs import Inputs, read_inputs
from perf_model.cli.plan_command import fixed_seconds
from perf_model.cli.screen import new_table, show
from perf_model.json_input import printable, reason
from perf_model.prediction.memory import DoesNotFit
from perf_model.schedule.placement import Placement
from perf_model.training_run.forecast import Infeasible
from perf_model.training_run.micro_batch import Overheads
from perf_model.training_run.model import ModelError
from perf_model.units import DIGITS, seconds, significant

SweepRow = dict[str, str | int | float | None]

COLUMNS = (
    "world_size", "micro_batch", "cpu", "streamed", "resident", "unit_size", "update_s", "exposed_update_s",
    "iteration_s", "tokens_per_s", "mfu", "stock_iteration_s", "speed_up", "gpu_peak_bytes", "host_bytes", "why",
)  # fmt: skip

SHOWN = {
    "world_size": "GPUs", "micro_batch": "batch", "cpu": "cpu", "streamed": "streamed", "resident": "resident",
    "exposed_update_s": "exposed", "iteration_s": "iteration", "tokens_per_s": "tokens/s", "mfu": "MFU",
    "speed_up": "speed-up",
}  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Print the table, write the CSV file, and return the exit code: 1 if nothing fits for any pair."""
    # An impossible pair is refused before the others are planned for, and the table is printed before writing can fail.
    inputs = read_inputs(options, *product(options.world_sizes, options.micro_batches))
    rows = list(map(_row, inputs))
    _print_table(rows, inputs[0].overheads)
    if options.csv is not None:
        _write(rows, options.csv)
    return 0 if any(row["why"] is None for row in rows) else 1


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
        "unit_size": found.unit_size,
        "stock_iteration_s": None if isinstance(stock, Infeasible) else stock.iteration_s,
        "speed_up": found.speed_up(found.predicted),
        "gpu_peak_bytes": found.memory.gpu_bytes,
        "host_bytes": found.memory.host_bytes,
    }


def _write(rows: list[SweepRow], path: Path) -> None:
    try:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
    except (OSError, ValueError) as error:
        rule = f"--csv: must be a file that can be written, found {printable(path)}: {reason(error)}"
        raise ModelError(f"{rule}.\nName another file.") from None


def _print_table(rows: list[SweepRow], overheads: Overheads) -> None:
    table = new_table(SHOWN.values())
    for row in rows:
        cells = [_cell(key, row[key]) for key in SHOWN]
        table.add_row(*cells if row["why"] is None else [*cells[:2], "-"])
    show(table)
    for row in rows:
        if row["why"] is not None:
            show(f"{row['world_size']} GPUs, micro-batch {row['micro_batch']}: {row['why']}", soft_wrap=True)
    legend = "exposed: exposed update time; speed-up: of an iteration, over the stock offload of DeepSpeed today"
    show(legend + (f"; of each iteration, {fixed_seconds(overheads)}" if overheads.step_s > 0 else ""))


def _cell(column: str, value: str | int | float | None) -> str:
    if isinstance(value, float):
        is_seconds = column.endswith("_s") and column != "tokens_per_s"
        return seconds(value, DIGITS) if is_seconds else significant(value, DIGITS)
    return "-" if value is None else str(value)
