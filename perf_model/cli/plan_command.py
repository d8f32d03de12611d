"""Print a plan, for people or as JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from perf_model.cli.explanation import explain, unit_rows
from perf_model.cli.inputs import Inputs, read_inputs, writing
from perf_model.cli.plan_json import deepspeed_config, to_json_dict
from perf_model.cli.remedies import remedy_for
from perf_model.cli.screen import new_table, progress, show, tables
from perf_model.json_input import printable
from perf_model.prediction.memory import DoesNotFit
from perf_model.prediction.overlap_windows import Windows
from perf_model.presets.comparison import comparison
from perf_model.schedule.placement import Placement
from perf_model.training_run.forecast import Forecast, Infeasible
from perf_model.training_run.micro_batch import Overheads
from perf_model.units import DIGITS, billions, counted, gigabytes_per_second, seconds, significant, size, size_of

if TYPE_CHECKING:
    from rich.table import Table

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


def run(options: argparse.Namespace) -> int:
    """Print the plan, and return the exit code."""
    with progress("Planning"):
        [inputs] = read_inputs(options, (options.world_size, options.micro_batch))
        try:
            found = inputs.forecast()
        except DoesNotFit as error:
            raise DoesNotFit(error.missing, remedy_for(error, inputs)) from None
        if options.timeline is not None:
            _write_timeline(found, options.timeline)
        printed = to_json_dict(found, inputs) if options.json else deepspeed_config(found, inputs)
        lines = [] if options.json else list(_screen(found, inputs, options))
    for line in lines:
        show(line)
    if not options.json:
        optimizer = ' bf16 moments also need an "optimizer" there.' if inputs.job.states == "bf16" else ""
        print(f"\nPaste into your DeepSpeed config:{optimizer}")
    print(json.dumps(printed, indent=2))
    return 0


def _screen(found: Forecast, inputs: Inputs, options: argparse.Namespace) -> Iterator[str | Table]:
    job, profiled = found.job, inputs.profile.provenance
    machine = profiled.gpu or f"{profiled.cpu or inputs.profile.name} (no GPU)"
    yield _verdict(found, inputs, f"on {job.world_size} x {machine} without offloading")
    per_rank = billions(found.planned.plan.workload.numel)
    yield f"\n{job.shape.description} on {job.world_size} x {machine}, {per_rank} per rank"
    yield f"{_assumed(found, inputs)}\n"
    yield from _comparison(found)
    yield f"\n{comparison(inputs.profile, job)} At its end, training logs predicted and measured times."
    limits, memory, reserved = inputs.limits, found.memory, size(found.reserved_host_bytes, DIGITS)
    yield ""
    if inputs.profile.has_accelerator:
        cached = size(memory.gpu_bytes - found.taken_gpu_bytes, DIGITS)
        yield f"memory per GPU: {size_of(memory.gpu_bytes, limits.gpu)}, {cached} of it for PyTorch's cache"
    pinned = size(memory.pinned_bytes, DIGITS)
    if limits.pinned is not None:
        pinned = size_of(memory.pinned_bytes, limits.pinned * job.ranks_on_node)
    yield (
        f"memory per host: {size_of(memory.host_bytes, limits.host)}, with {reserved} for the system and processes, "
        f"and {pinned} pinned; fixed parts are from published logs"
    )
    if found.disk_bytes:
        read, write, both = (gigabytes_per_second(job.ranks_on_node * rate) for rate in job.disk or ())
        rates = f"{read} read, {write} written, {both} both together (--nvme)"
        yield f"on the disks of each host: {size(found.disk_bytes, DIGITS)}, {rates}"
    if options.explain:
        yield "\n" + "\n".join(explain(found, inputs))
    if options.units:
        yield from _units(found)
    if options.timeline is not None:
        viewer = " (open it at https://ui.perfetto.dev)" if options.timeline.suffix == ".json" else ""
        yield f"\nWritten: {printable(options.timeline)}{viewer}"


def _verdict(found: Forecast, inputs: Inputs, where: str) -> str:
    """Return two sentences: whether training fits without offloading, and how fast it is with the plan."""
    name, limits, predicted = found.job.shape.name, inputs.limits, found.predicted
    stock, no_offload = found.baselines["stock"], found.baselines["no_offload"]
    limit = None if limits.gpu is None else max(0, limits.gpu - limits.gpu_margin)
    need = f"{size_of(found.no_offload_bytes, limit)} per GPU"
    compared = []
    if not isinstance(no_offload, Infeasible):
        fits = f"{name} fits {where} ({need}, {seconds(no_offload.iteration_s, DIGITS)} per iteration)."
        faster = significant(no_offload.iteration_s / predicted.iteration_s, DIGITS)
        compared.append(f"{faster} times as fast as without offloading")
    elif no_offload.reason.startswith("does not fit"):
        fits = f"{name} does not fit {where} ({need})."
    else:
        fits = f"Training {where} is not predicted: {no_offload.reason}."
    if isinstance(stock, Infeasible):
        compared.append("stock DeepSpeed's offload cannot run")
    else:
        faster = significant(stock.iteration_s / predicted.iteration_s, DIGITS)
        compared.append(f"{faster} times as fast as with stock DeepSpeed's offload")
    taken = f"With this plan, an iteration takes {seconds(predicted.iteration_s, DIGITS)}"
    return f"{fits} {taken}: {', and '.join(compared)}; {_limit(found)} takes longest."


def _limit(found: Forecast) -> str:
    """Return the longest part of the iteration."""
    predicted, (all_s, without_network_s, products_s) = found.predicted, found.phases_s
    parts_s = {
        "computing": products_s,
        "the host, which launches kernels and runs hooks,": without_network_s - products_s + predicted.fixed_s,
        "the network": all_s - without_network_s,
        "work during copies and updates": predicted.forward_s + predicted.backward_s - all_s,
        f"the update ({found.bound.binding.value})": predicted.exposed_update_s,
    }
    return max(parts_s, key=lambda part: parts_s[part])


def _assumed(found: Forecast, inputs: Inputs) -> str:
    """Return the assumptions of the prediction, and the origin of its rates."""
    job, profile = found.job, inputs.profile
    origin = f"{profile.provenance.source.partition(':')[0]} (sources: plan --list)"
    if profile.provenance.source == "measured":
        origin = f"rates measured on {profile.provenance.host}, {profile.provenance.date}"
        if profile.provenance.ranks != job.ranks_on_node:
            measured = counted(profile.provenance.ranks, "rank")
            origin += f"; measured with {measured} per node, but {job.ranks_on_node} will train"
    network = []
    for count, where, name in (
        (job.ranks_on_node, "in a node", "all_gather_bytes_per_s"),
        (job.world_size // job.ranks_on_node, "between nodes", "inter_node_bytes_per_s"),
    ):
        if count > 1:
            rate = profile.get(name)
            network.append(f"{'an ideal network' if rate is None else gigabytes_per_second(rate)} {where}")
    assumed = [
        "bf16" if job.states == "fp32" else f"bf16 with states {job.states}",
        "gradient checkpointing" if job.recompute else "all activations kept",
        f"{job.attention} attention",
        f"{job.accumulation} x {job.micro_batch} sequences of {job.sequence} tokens per rank and step",
        "parameters in host memory" if job.offload_param else "",
        f"{significant(100 * share, DIGITS)}% of each parameter trained" if (share := job.trainable_share) < 1 else "",
        f"tensor parallelism of {job.tensor_parallel} ranks" if job.tensor_parallel > 1 else "",
        *network,
    ]
    model = f"\nmodel: {job.shape.source}" if job.shape.source else ""
    return f"assumed: {', '.join(filter(None, assumed))}\n{origin}{model}"


def _comparison(found: Forecast) -> Iterator[str | Table]:
    outcomes = {"this plan": found.predicted, **found.baselines}
    rows = []
    for name, outcome in outcomes.items():
        if not isinstance(outcome, Infeasible):
            speed_up = found.speed_up(outcome)
            exposed_s, hidden_s = outcome.exposed_update_s, max(0.0, outcome.update_s - outcome.exposed_update_s)
            parts_s = (outcome.forward_s, outcome.backward_s, exposed_s, hidden_s, outcome.iteration_s)
            row = [
                TITLES.get(name, name),
                *(seconds(part_s, DIGITS) for part_s in parts_s),
                significant(outcome.tokens_per_s, DIGITS),
                "-" if outcome.mfu is None else f"{outcome.mfu:.0%}",
                "-" if speed_up is None else f"{significant(speed_up, DIGITS)}x",
            ]
            rows.append(row)
    yield from tables(COLUMNS, rows, 1, left=("",))
    for name, outcome in outcomes.items():
        if isinstance(outcome, Infeasible):
            yield f"{TITLES[name]}: {outcome.reason}"
    fixed = f"; {fixed_seconds(found.overheads)}" if found.overheads.step_s > 0 else ""
    yield (
        "exposed, hidden: update time by which the iteration grows, and that backward and forward hide"
        f"{fixed}; speed-up: of an iteration, over the stock offload of DeepSpeed today, with asynchronous copies of "
        "gradients"
    )


def fixed_seconds(overheads: Overheads) -> str:
    """Return a description of the host's seconds per module, with their source."""
    forward_s, backward_s, step_s = (
        seconds(each_s, DIGITS) for each_s in (overheads.forward_s, overheads.backward_s, overheads.step_s)
    )
    hooks = ""
    if overheads.cpu_slowdown > 0:
        hooks = (
            f"; the plugin's hooks take {seconds(overheads.hooks_s, DIGITS)} more in forward, and the model has "
            f"{1 - overheads.cpu_slowdown:.0%} of its speed during updates on the CPU, which is counted in forward"
        )
    return (
        f"the host takes at least {forward_s} per module in forward, {backward_s} in backward and {step_s} in step()"
        f"{hooks}, by {overheads.source}"
    )


def _units(found: Forecast) -> Iterator[str | Table]:
    plan, bound, update_s = found.planned.plan, found.bound, found.planned.update_s
    counts = ", ".join(f"{placement.value} {plan.placements.count(placement)}" for placement in Placement)
    together = "exposed and hidden time together" if found.windows != Windows() else "all of it exposed"
    yield (
        f"\n{counts} units of at most {found.planned.unit_size / 1e6:,.0f} M parameters; {plan.schedule.num_slots} "
        f"slots (GPU buffers for streamed units)\nlower bound of the update, {together}: "
        f"{seconds(bound.seconds, DIGITS)} (limited by {bound.binding.value}); this plan takes "
        f"{significant(update_s / bound.seconds, DIGITS)} times as long"
    )
    if plan.eager:
        taken = size(found.planned.memory.eager_bytes, DIGITS)
        yield (
            f"eager units: {len(plan.eager)}, {billions(plan.eager_numel)} parameters, with {taken} of host "
            "memory per rank for second versions of states"
        )
    headers, rows = ("units", "layers", "parameters", "placement", "rule"), unit_rows(found)
    table = new_table(headers, left={*headers} - {"parameters"})
    for column in table.columns:
        column.no_wrap, column.overflow = False, "fold"
    for row in rows[:MAX_ROWS]:
        table.add_row(*row)
    yield table
    if (more := len(rows) - MAX_ROWS) > 0:
        yield f"... and {more} more rows; --json prints every unit"


def _write_timeline(found: Forecast, path: Path) -> None:
    """Write a trace or a picture, by the suffix."""
    from perf_model.prediction.draw import draw

    plan, timeline = found.planned.plan, found.planned.timeline
    phases = found.windows.phases(timeline, plan.workload, found.cost)
    with writing("--timeline", path):
        if path.suffix == ".json":
            timeline.write_chrome_trace(path, phases)
        else:
            draw(timeline, path, str(plan), phases)
