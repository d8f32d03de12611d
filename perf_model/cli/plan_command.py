"""Print a plan, for people or as JSON."""

from __future__ import annotations

import argparse
import json

from perf_model.cli.inputs import Inputs, read_inputs
from perf_model.cli.plan_json import deepspeed_config, to_json_dict
from perf_model.cli.screen import new_table, show
from perf_model.cli.unit_runs import unit_runs
from perf_model.prediction.overlap_windows import Windows
from perf_model.presets.comparison import comparison
from perf_model.schedule.placement import Placement
from perf_model.training_run.forecast import Forecast, Infeasible
from perf_model.training_run.micro_batch import Overheads
from perf_model.units import DIGITS, billions, percent, seconds, significant, size

MAX_ROWS = 20

TITLES = {
    "stock": "stock offload",
    "twin_flow": "Twin-Flow",
    "all_cpu": "all on the CPU",
    "all_streamed": "all streamed",
    "stride_2": "stride 2",
    "no_offload": "no offload",
}

COLUMNS = ("", "forward", "backward", "exposed", "hidden", "iteration", "tokens/s", "MFU", "speed-up")
"""The headers of the comparison. They fit into 80 columns."""

WHY = "why: the rule; otherwise, by how much the exposed time changes if one unit like these has another placement"


def run(options: argparse.Namespace) -> int:
    """Print the plan, and return the exit code."""
    [inputs] = read_inputs(options, (options.world_size, options.micro_batch))
    found = inputs.forecast()
    if options.json:
        print(json.dumps(to_json_dict(found, inputs), indent=2))
    else:
        _print_screen(found, inputs)
    return 0


def _print_screen(found: Forecast, inputs: Inputs) -> None:
    plan = found.planned.plan
    profiled = inputs.profile.provenance
    machine = profiled.gpu or f"{profiled.cpu or inputs.profile.name} (no GPU)"
    _print_answer(found, inputs, machine)
    show(f"\n{_setting(found, inputs, machine)}\n")
    _print_comparison(found, inputs)
    show(f"\n{_bound(found)}\nmemory: {_memory(found, inputs)}\n")
    counts = ", ".join(f"{placement.value} {plan.placements.count(placement)}" for placement in Placement)
    show(f"update: {counts}; {plan.schedule.num_slots} slots (GPU buffers for streamed units)")
    if plan.eager:
        taken = (
            f"{size(found.planned.memory.eager_bytes, DIGITS)} of host memory per rank for second versions of states"
        )
        show(f"eager: {len(plan.eager)} of the cpu units, {billions(plan.eager_numel)} parameters, with {taken}")
    _print_units(found)
    print("Paste into your DeepSpeed config:")
    print(json.dumps(deepspeed_config(found, inputs), indent=2))


def _print_answer(found: Forecast, inputs: Inputs, machine: str) -> None:
    job, limits, predicted = found.job, inputs.limits, found.predicted
    stock, no_offload = found.baselines["stock"], found.baselines["no_offload"]
    limit = "unlimited memory" if limits.gpu is None else size(max(0, limits.gpu - limits.gpu_margin))
    need = f"{size(found.no_offload_bytes, DIGITS)} of {limit} per GPU"
    where = f"on {job.world_size} x {machine} without offloading"
    compared = []
    if not isinstance(no_offload, Infeasible):
        fits = f"{job.shape.name} fits {where} ({need}, {seconds(no_offload.iteration_s, DIGITS)} per iteration)."
        faster = significant(no_offload.iteration_s / predicted.iteration_s, DIGITS)
        compared.append(f"{faster} times as fast as without offloading")
    elif Placement.STREAMED in found.cost.placements:
        fits = f"{job.shape.name} does not fit {where} ({need})."
    else:
        fits = f"Training {where} is not predicted: {no_offload.reason}."
    if isinstance(stock, Infeasible):
        compared.append("stock DeepSpeed's offload cannot run")
    else:
        faster = significant(stock.iteration_s / predicted.iteration_s, DIGITS)
        compared.append(f"{faster} times as fast as with stock DeepSpeed's offload")
    taken = f"With this plan, an iteration takes {seconds(predicted.iteration_s, DIGITS)}"
    show(f"{fits} {taken}: {', and '.join(compared)}.")
    show(f"{comparison(inputs.profile)} At its end, training logs predicted and measured times.")


def _setting(found: Forecast, inputs: Inputs, machine: str) -> str:
    job, workload, profiled = found.job, found.planned.plan.workload, inputs.profile.provenance
    count = len(workload.units)
    lines = [
        f"{job.shape.description} on {job.world_size} x {machine}, {billions(workload.numel)} per rank, "
        f"{count} units of {workload.numel / count / 1e6:,.0f} M, at most {found.unit_size / 1e6:,.0f} M"
    ]
    if job.shape.source:
        lines.append(f"model: {job.shape.source}")
    origin = profiled.source
    if origin == "measured":
        origin += f" on {profiled.host}, {profiled.date}"
        if profiled.ranks != job.ranks_on_node:
            origin += f"; {profiled.ranks} ranks per node measured, but {job.ranks_on_node} will train"
    return "\n".join((*lines, origin))


def _print_comparison(found: Forecast, inputs: Inputs) -> None:
    table = new_table(COLUMNS, left=("",))
    outcomes = {"this plan": found.predicted, **found.baselines}
    for name, outcome in outcomes.items():
        if not isinstance(outcome, Infeasible):
            durations_s = (outcome.forward_s, outcome.backward_s, outcome.exposed_update_s, outcome.hidden_update_s)
            speed_up = found.speed_up(outcome)
            table.add_row(
                TITLES.get(name, name),
                *(seconds(duration_s, DIGITS) for duration_s in (*durations_s, outcome.iteration_s)),
                significant(outcome.tokens_per_s, DIGITS),
                "-" if outcome.mfu is None else percent(outcome.mfu),
                "-" if speed_up is None else f"{significant(speed_up, DIGITS)}x",
            )
    show(table)
    for name, outcome in outcomes.items():
        if isinstance(outcome, Infeasible):
            show(f"{TITLES[name]}: {outcome.reason}")
    overheads = inputs.overheads
    fixed = f"; of each iteration, {fixed_seconds(overheads)}" if overheads.step_s > 0 else ""
    show(
        "exposed, hidden: update time by which the iteration grows, and that backward and forward hide"
        f"{fixed}; speed-up: of an iteration, over the stock offload of DeepSpeed today, with asynchronous copies of "
        "gradients"
    )


def fixed_seconds(overheads: Overheads) -> str:
    """Return a description of the host's seconds per module, with their source."""
    forward_s, backward_s, step_s = (
        seconds(each_s, DIGITS) for each_s in (overheads.forward_s, overheads.backward_s, overheads.step_s)
    )
    return (
        f"the host takes {forward_s} per module in forward, {backward_s} in backward and {step_s} in step(), by "
        f"{overheads.source}"
    )


def _bound(found: Forecast) -> str:
    bound, update_s = found.bound, found.planned.update_s
    together = "exposed and hidden time together" if found.windows != Windows() else "all of it exposed"
    return (
        f"lower bound of the update, {together}: {seconds(bound.seconds, DIGITS)} (limited by {bound.binding.value}); "
        f"this plan takes {significant(update_s / bound.seconds, DIGITS)} times as long"
    )


def _memory(found: Forecast, inputs: Inputs) -> str:
    limits, memory = inputs.limits, found.memory
    pinned = None if limits.pinned is None else limits.pinned * found.job.ranks_on_node
    host = f"host with {size(found.reserved_host_bytes, DIGITS)} for the system and processes"
    kinds = [(host, memory.host_bytes, limits.host), ("of which pinned", memory.pinned_bytes, pinned)]
    if inputs.profile.has_accelerator:
        kinds.insert(0, ("GPU", memory.gpu_bytes, limits.gpu))
    return ", ".join(
        f"{name} {size(taken, DIGITS)} of {'no limit' if limit is None else size(limit)}"
        for name, taken, limit in kinds
    )


def _print_units(found: Forecast) -> None:
    headers = ("units", "layers", "parameters", "placement", "why")
    table, runs = new_table(headers, left={*headers} - {"parameters"}), unit_runs(found)
    for column in table.columns:
        column.no_wrap, column.overflow = False, "fold"
    for run in runs[:MAX_ROWS]:
        table.add_row(run.indices, run.layers, f"{run.numel / 1e6:,.1f} M", run.placement.value, run.why)
    show(table)
    if (more := len(runs) - MAX_ROWS) > 0:
        show(f"... and {more} more rows; --json prints every unit")
    show(f"{WHY}\n")
