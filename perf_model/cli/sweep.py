"""``sweep``: the plan over numbers of GPUs and micro-batches, as a table and as CSV."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from perf_model.cli.inputs import add_arguments, read_inputs
from perf_model.schedule.placement import Placement
from perf_model.search.budgets import DoesNotFit
from perf_model.training_run.forecast import Forecast, Unfit
from perf_model.training_run.model import ModelError

Row = dict[str, str | int | float | None]

COLUMNS = (
    "world_size", "micro_batch", "cpu", "streamed", "resident", "sub_group_size", "update_s", "exposed_update_s",
    "iteration_s", "tokens_per_s", "mfu", "stock_iteration_s", "speed_up", "gpu_peak_bytes", "host_bytes", "why",
)  # fmt: skip


_TITLES = {
    "world_size": "GPUs",
    "micro_batch": "batch",
    "exposed_update_s": "exposed",
    "iteration_s": "iteration",
    "tokens_per_s": "tokens/s",
    "mfu": "MFU",
    "speed_up": "speed up",
}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    about = "plan for several numbers of GPUs and micro-batches"
    parser = commands.add_parser("sweep", help=about, description=about.capitalize() + ".")
    add_arguments(parser, job=False)
    parser.add_argument("--world-sizes", type=_numbers, required=True, help="for example 1,2,4,8")
    parser.add_argument("--micro-batches", type=_numbers, required=True, help="for example 1,2,4")
    parser.add_argument("--csv", type=Path, help="a file to write the rows to")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    rows = list(_rows(options))
    if options.csv is not None:
        _write(rows, options.csv)
    _print_table(rows)
    return 0 if any(row["why"] is None for row in rows) else 1


def _rows(options: argparse.Namespace) -> Iterator[Row]:
    for world_size, micro_batch in product(options.world_sizes, options.micro_batches):
        inputs = read_inputs(options, world_size, micro_batch)
        row: Row = dict.fromkeys(COLUMNS)
        row.update(world_size=world_size, micro_batch=micro_batch)
        try:
            row.update(_found(inputs.forecast()))
        except DoesNotFit as error:
            row["why"] = error.rule
        yield row


def _found(found: Forecast) -> Row:
    placements = found.planned.plan.placements
    stock = found.baselines["stock"]
    stock_s = None if isinstance(stock, Unfit) else stock.iteration_s
    return {
        **{placement.value: placements.count(placement) for placement in Placement},
        **{key: value for key, value in found.predicted.to_json_dict().items() if key in COLUMNS},
        "sub_group_size": found.sub_group_size,
        "stock_iteration_s": stock_s,
        "speed_up": None if stock_s is None else stock_s / found.predicted.iteration_s,
        "gpu_peak_bytes": found.memory.gpu_bytes,
        "host_bytes": found.memory.host_bytes,
    }


def _write(rows: list[Row], path: Path) -> None:
    try:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
    except OSError as error:
        raise ModelError(
            f"--csv: must be a file that can be written, found {path}: {error.strerror}.\nName another."
        ) from None


def _print_table(rows: list[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    shown = (*COLUMNS[:5], "exposed_update_s", "iteration_s", "tokens_per_s", "mfu", "speed_up")
    for column in shown:
        table.add_column(_TITLES.get(column, column), justify="right", no_wrap=True)
    for row in rows:
        cells = [_cell(row[key]) for key in shown]
        table.add_row(*cells if row["why"] is None else [*cells[:2], "-"])
    console = Console()
    console.print(table)
    for row in rows:
        if row["why"] is not None:
            where = f"{row['world_size']} GPUs, micro-batch {row['micro_batch']}"
            console.print(f"{where}: {row['why']}", highlight=False, markup=False, soft_wrap=True)
    console.print("exposed: of the update, seconds; speed up: of an iteration, over stock offload's", highlight=False)


def _cell(value: str | int | float | None) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
    return "-" if value is None else str(value)


def _numbers(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isascii() and part.strip().isdigit() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"must be positive integers with commas between, found {text!r}")
    return [int(part) for part in parts]
