"""Show in numbers why each unit has its placement."""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

from perf_model.cli.inputs import read_inputs
from perf_model.cli.unit_runs import changes_by_move, show_change
from perf_model.schedule.happens_before import CHAINS
from perf_model.schedule.placement import Placement
from perf_model.search.bounds import busy_s_per_param, resources
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
    per_param, plan = busy_s_per_param(found.cost), found.planned.plan
    total = plan.workload.numel
    mixes: list[dict[Placement, int]] = [
        {placement: total} for placement in (Placement.CPU, Placement.STREAMED) if placement in per_param
    ]
    mixes.append({placement: plan.numel(placement) for placement in per_param})
    rows: list[Sequence[str]] = []
    for row, resource in enumerate(resources(found.cost)):
        busy_s = [sum(numel * per_param[placement][row] for placement, numel in mix.items()) for mix in mixes]
        if max(busy_s) > 0:
            rows.append((resource.value, *(seconds(each_s, DIGITS) for each_s in busy_s)))
    title = f"Busy time of each resource; the update of this plan takes {seconds(found.planned.update_s, DIGITS)}"
    rules = ("all cpu", "all streamed")[: len(mixes) - 1]
    return title, ("", *rules, "this plan"), rows


def _units(found: Forecast) -> TableContents:
    """Return one row per size and placement of units. A move is that of the middle one of these units."""
    plan = found.planned.plan
    by_placement_and_numel: dict[tuple[Placement, int], list[int]] = defaultdict(list)
    for unit, placement in zip(plan.workload.units, plan.placements, strict=True):
        by_placement_and_numel[placement, unit.numel].append(unit.index)
    middles = {key: indices[len(indices) // 2] for key, indices in by_placement_and_numel.items()}
    changes_s = changes_by_move(found, list(middles.values()))
    rows: list[Sequence[str]] = []
    for (placement, numel), indices in by_placement_and_numel.items():
        loads = (f"{kind.value} {seconds(found.cost.load(kind, numel).total_s, DIGITS)}" for kind in CHAINS[placement])
        moved = []
        for other in Placement:
            move = middles[placement, numel], other
            here_or_impossible = "here" if other is placement else "not possible"
            moved.append(show_change(changes_s[move]) if move in changes_s else here_or_impossible)
        rows.append((_first_few(indices), f"{numel / 1e6:,.1f} M", placement.value, "\n".join(loads), *moved))
    title = "Moving one of these units changes the exposed time by"
    moves = (f"to {placement.value}" for placement in Placement)
    return title, ("units", "size", "now", "alone", *moves), rows


def _first_few(indices: Sequence[int]) -> str:
    """Return a text such as ``17, 23, 29 and 16 more``."""
    shown = ", ".join(map(str, indices[:3]))
    return shown if len(indices) <= 3 else f"{shown} and {len(indices) - 3} more"
