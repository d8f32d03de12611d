"""``explain``: why each sub-group is where it is, in numbers."""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from perf_model.cli.inputs import add_arguments, read_inputs
from perf_model.prediction.memory import memory_of
from perf_model.schedule.happens_before import CHAINS
from perf_model.schedule.placement import Placement
from perf_model.search.bounds import busy_s_per_param, limits
from perf_model.search.planner import evaluate
from perf_model.training_run.forecast import Forecast
from perf_model.training_run.job import PARAM_BYTES
from perf_model.units import seconds


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    about = "say why each sub-group is where it is, in numbers"
    parser = commands.add_parser("explain", help=about, description=about.capitalize() + ".")
    add_arguments(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    found = read_inputs(options, options.world_size, options.micro_batch).forecast()
    console = Console()
    console.print(f"{found.planned.plan}\n", highlight=False, markup=False, soft_wrap=True)
    for title, headers, rows in (_resources(found), _sub_groups(found)):
        console.print(title, highlight=False, markup=False)
        table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
        for header in headers:
            justify: Literal["left", "right"] = "left" if header in ("", "sub-groups", "alone") else "right"
            # Whatever is cut off would be missing; lines that list actions are easier to read whole.
            table.add_column(header, justify=justify, overflow="fold", no_wrap=header == "alone")
        for row in rows:
            table.add_row(*row)
        console.print(table)
        console.print()
    return 0


Rows = tuple[str, Sequence[str], list[Sequence[str]]]


def _resources(found: Forecast) -> Rows:
    """Seconds in which each resource has something to do, whatever the order."""
    per_param, plan = busy_s_per_param(found.cost), found.planned.plan
    total = plan.workload.numel
    mixes: list[dict[Placement, int]] = [
        {its: total} for its in (Placement.CPU, Placement.STREAMED) if its in per_param
    ]
    mixes.append({its: plan.numel(its) for its in per_param})
    rows: list[Sequence[str]] = []
    for limit, resource in enumerate(limits(found.cost)):
        busy_s = [sum(numel * per_param[its][limit] for its, numel in mix.items()) for mix in mixes]
        if max(busy_s) > 0:
            rows.append((resource.value, *map(seconds, busy_s)))
    title = f"Each resource has this much to do; the update of this plan takes {seconds(found.planned.update_s)}"
    rules = ("all cpu", "all streamed")[: len(mixes) - 1]
    return title, ("", *rules, "this plan"), rows


def _sub_groups(found: Forecast) -> Rows:
    """One row for the sub-groups of one size and placement, of which one, in their middle, is moved elsewhere."""
    plan = found.planned.plan
    alike: dict[tuple[Placement, int], list[int]] = defaultdict(list)
    for sub_group, placement in zip(plan.workload.sub_groups, plan.placements, strict=True):
        alike[placement, sub_group.numel].append(sub_group.index)
    rows: list[Sequence[str]] = []
    for (placement, numel), indices in alike.items():
        loads = (f"{kind.value} {seconds(found.cost.load(kind, numel).total_s)}" for kind in CHAINS[placement])
        middle = indices[len(indices) // 2]
        moved = ["here" if other is placement else _moved(found, middle, other) for other in Placement]
        rows.append((_some(indices), f"{numel / 1e6:,.1f} M", placement.value, "\n".join(loads), *moved))
    title = "One of them moved elsewhere changes the exposed time by"
    return title, ("sub-groups", "of", "are", "alone", *(f"to {its.value}" for its in Placement)), rows


def _moved(found: Forecast, index: int, placement: Placement) -> str:
    plan = found.planned.plan
    if placement not in found.cost.placements:
        return "not possible"
    placements = (*plan.placements[:index], placement, *plan.placements[index + 1 :])
    other = replace(plan, placements=placements)
    if found.budgets.missing(memory_of(other, PARAM_BYTES)):
        return "no room"
    exposed_s = evaluate(other, found.cost, found.budgets, found.windows, PARAM_BYTES).exposed_s
    change_s = exposed_s - found.planned.exposed_s
    return ("+" if change_s >= 0 else "-") + seconds(abs(change_s))


def _some(indices: Sequence[int]) -> str:
    """``17, 23, 29 and 16 more``."""
    shown = ", ".join(map(str, indices[:3]))
    return shown if len(indices) <= 3 else f"{shown} and {len(indices) - 3} more"
