"""Print a plan, for people or as JSON: the answer, the iteration next to the alternatives, the units, the block."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from perf_model.cli.inputs import Inputs, read_inputs
from perf_model.cli.plan_answer import answer, fixed_seconds, machine_name, past_errors
from perf_model.cli.plan_json import deepspeed_config, to_json_dict
from perf_model.cli.unit_runs import UnitRun, unit_runs
from perf_model.prediction.overlap_windows import Windows
from perf_model.schedule.placement import Placement
from perf_model.training_run.forecast import Forecast
from perf_model.training_run.micro_batch import Overheads
from perf_model.training_run.predictor import Infeasible, PredictedIteration
from perf_model.units import DIGITS, billions, percent, seconds, significant, size

if TYPE_CHECKING:
    from rich.table import Table

MAX_ROWS = 20
"""The most rows of units on the screen."""

TITLES = {
    "stock": "stock offload",
    "twin_flow": "Twin-Flow",
    "all_cpu": "all on the CPU",
    "all_streamed": "all streamed",
    "stride_2": "stride 2",
    "no_offload": "no offload",
}
"""The titles on the screen, by the keys in JSON."""

COLUMNS = ("", "forward", "backward", "exposed", "hidden", "iteration", "tokens/s", "MFU", "speed-up")
"""The headers of the comparison, which fits into 80 columns."""

WHY = "why: the rule; otherwise, by how much the exposed time changes if one unit like these has another placement"


def run(options: argparse.Namespace) -> int:
    """Print the plan, and return the exit code."""
    inputs = read_inputs(options, options.world_size, options.micro_batch)
    found = inputs.forecast()
    if options.json:
        print(json.dumps(to_json_dict(found, inputs), indent=2))
    else:
        _print_screen(found, inputs)
    return 0


def _print_screen(found: Forecast, inputs: Inputs) -> None:
    """Print the forecast. Text is wrapped at the width of the terminal, and the block to paste is not."""
    from rich.console import Console

    console = Console()

    def show(text: str) -> None:
        console.print(text, highlight=False, markup=False)

    show(answer(found, inputs))
    if inputs.profile.has_accelerator:
        show(past_errors())
    show(f"\n{_setting(found, inputs)}\n")
    console.print(_comparison(found))
    for name, outcome in found.baselines.items():
        if isinstance(outcome, Infeasible):
            show(f"{TITLES[name]}: {outcome.reason}")
    show(_legend(inputs.overheads))
    show(f"\n{_bound(found)}")
    show(f"memory: {_memory(found, inputs)}")
    show("")
    show(_placements(found))
    runs = unit_runs(found)
    console.print(_units(runs[:MAX_ROWS]))
    if (more := len(runs) - MAX_ROWS) > 0:
        show(f"... and {more} more rows; --json prints every unit")
    show(f"{WHY}\n")
    print("Paste into your DeepSpeed config:")
    print(json.dumps(deepspeed_config(found, inputs), indent=2))


def _setting(found: Forecast, inputs: Inputs) -> str:
    """Describe the model, the machine and the units, and where the model and the rates are from."""
    job, plan = found.job, found.planned.plan
    count = len(plan.placements)
    lines = [
        f"{job.shape.description} on {job.world_size} x {machine_name(inputs)}, "
        f"{billions(plan.workload.numel)} per rank, {count} units of {plan.workload.numel / count / 1e6:,.0f} M, "
        f"at most {found.unit_size / 1e6:,.0f} M"
    ]
    if job.shape.source:
        lines.append(f"model: {job.shape.source}")
    return "\n".join((*lines, _origin(inputs)))


def _origin(inputs: Inputs) -> str:
    """Describe the origin of the rates. If the measurement and training have different numbers of ranks, name both."""
    profiled, ranks = inputs.profile.provenance, inputs.job.ranks_on_node
    if profiled.source != "measured":
        return profiled.source
    shared = "" if profiled.ranks == ranks else f"; {profiled.ranks} ranks per node measured, but {ranks} will train"
    return f"measured on {profiled.host}, {profiled.date}{shared}"


def _comparison(found: Forecast) -> Table:
    """Return a row for the plan and for each alternative that can run."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for header in COLUMNS:
        table.add_column(header, justify="right" if header else "left", no_wrap=True)
    for name, outcome in {"this plan": found.predicted, **found.baselines}.items():
        if not isinstance(outcome, Infeasible):
            table.add_row(Text(TITLES.get(name, name)), *_figures(outcome, found.speed_up(outcome)))
    return table


def _figures(outcome: PredictedIteration, speed_up: float | None) -> list[str]:
    durations_s = (
        outcome.forward_s,
        outcome.backward_s,
        outcome.exposed_update_s,
        outcome.hidden_update_s,
        outcome.iteration_s,
    )
    return [
        *(seconds(duration_s, DIGITS) for duration_s in durations_s),
        significant(outcome.tokens_per_s, DIGITS),
        "-" if outcome.mfu is None else percent(outcome.mfu),
        "-" if speed_up is None else f"{significant(speed_up, DIGITS)}x",
    ]


def _legend(overheads: Overheads) -> str:
    """Explain the columns, and which stock is compared."""
    fixed = f"; of each iteration, {fixed_seconds(overheads)}" if overheads.iteration_s > 0 else ""
    return (
        "exposed, hidden: update time by which the iteration grows, and that backward and forward hide"
        f"{fixed}; speed-up: of an iteration, over the stock offload of DeepSpeed today, with asynchronous copies of "
        "gradients"
    )


def _bound(found: Forecast) -> str:
    """Return the lower bound of all the work, and how much longer the update takes."""
    bound, update_s = found.bound, found.planned.update_s
    together = "exposed and hidden time together" if found.windows != Windows() else "all of it exposed"
    return (
        f"lower bound of the update, {together}: {seconds(bound.seconds, DIGITS)} (limited by {bound.binding.value}); "
        f"this plan takes {significant(update_s / bound.seconds, DIGITS)} times as long"
    )


def _memory(found: Forecast, inputs: Inputs) -> str:
    """Return each kind of memory with its limit: GPU memory per GPU, the others per node."""
    limits, ranks = inputs.limits, found.job.ranks_on_node
    pinned = None if limits.pinned is None else limits.pinned * ranks
    kinds = (
        *([("GPU", found.memory.gpu_bytes, limits.gpu)] if inputs.profile.has_accelerator else []),
        (
            f"host with {size(found.reserved_host_bytes, DIGITS)} for the system and processes",
            found.memory.host_bytes,
            limits.host,
        ),
        ("of which pinned", found.memory.pinned_bytes, pinned),
    )
    return ", ".join(
        f"{name} {size(taken, DIGITS)} of {'no limit' if limit is None else size(limit)}"
        for name, taken, limit in kinds
    )


def _placements(found: Forecast) -> str:
    plan = found.planned.plan
    counts = ", ".join(f"{placement.value} {plan.placements.count(placement)}" for placement in Placement)
    return f"update: {counts}; {plan.schedule.num_slots} slots (GPU buffers for streamed units)"


def _units(runs: Sequence[UnitRun]) -> Table:
    """Return a row for each of these runs of units."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for header in ("units", "layers", "parameters", "placement", "why"):
        table.add_column(header, justify="right" if header == "parameters" else "left", overflow="fold")
    for run in runs:
        numel = f"{run.numel / 1e6:,.1f} M"
        # Text, because the pattern of a rule may contain square brackets, which are markup in a str.
        table.add_row(*map(Text, (run.indices, run.layers, numel, run.placement.value, run.why)))
    return table
