"""Show in numbers why each unit has its placement."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Literal

from perf_model.cli.inputs import read_inputs
from perf_model.cli.unit_runs import show_change, unit_groups
from perf_model.schedule.happens_before import CHAINS
from perf_model.schedule.placement import Placement
from perf_model.training_run.forecast import Forecast
from perf_model.units import DIGITS, seconds


def run(options: argparse.Namespace) -> int:
    """Print the plan, the busy time of each resource and the cost of moving a unit; return the exit code."""
    from rich.console import Console
    from rich.table import Table

    found = read_inputs(options, options.world_size, options.micro_batch).forecast()
    console = Console()
    console.print(f"{found.planned.plan}\n", highlight=False, markup=False, soft_wrap=True)
    for title, headers, rows in (_resources(found), _units(found)):
        console.print(title, highlight=False, markup=False)
        table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
        for header in headers:
            justify: Literal["left", "right"] = "left" if header in ("", "units", "alone") else "right"
            # Fold long cells: cutting them off would lose information. Lists of actions are never folded, because they
            # are easier to read in whole lines.
            table.add_column(header, justify=justify, overflow="fold", no_wrap=header == "alone")
        for row in rows:
            table.add_row(*row)
        console.print(table)
        console.print()
    return 0


TableContents = tuple[str, Sequence[str], list[Sequence[str]]]
"""Title, headers and rows."""


def _resources(found: Forecast) -> TableContents:
    """Return the seconds that each resource is busy for, whatever the order."""
    plan = found.planned.plan
    per_param = {placement: found.cost.busy_s_per_param(placement) for placement in found.cost.placements}
    total = plan.workload.numel
    mixes: list[dict[Placement, int]] = [
        {placement: total} for placement in (Placement.CPU, Placement.STREAMED) if placement in per_param
    ]
    mixes.append({placement: plan.numel(placement) for placement in per_param})
    rows: list[Sequence[str]] = []
    for resource in found.cost.capacities:
        busy_s = [sum(numel * per_param[placement][resource] for placement, numel in mix.items()) for mix in mixes]
        if max(busy_s) > 0:
            rows.append((resource.value, *(seconds(each_s, DIGITS) for each_s in busy_s)))
    title = f"Busy time of each resource; the update of this plan takes {seconds(found.planned.update_s, DIGITS)}"
    rules = ("all cpu", "all streamed")[: len(mixes) - 1]
    return title, ("", *rules, "this plan"), rows


def _units(found: Forecast) -> TableContents:
    """Return one row per size and placement of units. A move is that of the middle one of these units."""
    rows: list[Sequence[str]] = []
    for (placement, numel), group in unit_groups(found).items():
        loads = (f"{kind.value} {seconds(found.cost.load(kind, numel).total_s, DIGITS)}" for kind in CHAINS[placement])
        moved = {other: show_change(change_s) for other, change_s in group.changes_s.items()} | {placement: "here"}
        moves = [moved.get(other, "not possible") for other in Placement]
        rows.append((_first_few(group.indices), f"{numel / 1e6:,.1f} M", placement.value, "\n".join(loads), *moves))
    title = "Moving one of these units changes the exposed time by"
    headers = (f"to {placement.value}" for placement in Placement)
    return title, ("units", "size", "now", "alone", *headers), rows


def _first_few(indices: Sequence[int]) -> str:
    """Return a text such as ``17, 23, 29 and 16 more``."""
    shown = ", ".join(map(str, indices[:3]))
    return shown if len(indices) <= 3 else f"{shown} and {len(indices) - 3} more"
