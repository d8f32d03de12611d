"""``plan``: the split, what it is predicted to take beside the alternatives, and the block to paste."""

from __future__ import annotations

import argparse
import json
from math import ceil
from typing import Any

from perf_model.cli.inputs import Inputs, add_arguments, read_inputs
from perf_model.prediction.overlap_windows import Windows
from perf_model.schedule.placement import Placement
from perf_model.training_run.forecast import Arm, Forecast, Unfit
from perf_model.units import GB, billions, gigabytes, percent, seconds

NAMES = {
    "stock": "stock offload",
    "twin_flow": "Twin-Flow",
    "all_cpu": "all on the CPU",
    "all_streamed": "all streamed",
    "stride_2": "stride 2",
    "no_offload": "no offload",
}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    about = "find the split with the least exposed update time, and compare it"
    parser = commands.add_parser("plan", help=about, description=about.capitalize() + ".")
    add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON; host and pinned bytes are of one node")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    inputs = read_inputs(options, options.world_size, options.micro_batch)
    found = inputs.forecast()
    if options.json:
        print(json.dumps(to_json_dict(found, inputs), indent=2))
    else:
        _print_screen(found, inputs)
    return 0


def to_json_dict(found: Forecast, inputs: Inputs) -> dict[str, Any]:
    placements = found.planned.plan.placements
    return {
        "predicted": found.predicted.to_json_dict(),
        "baselines": {name: _arm(arm, found) for name, arm in found.baselines.items()},
        "lower_bound_s": found.planned.exposed_bound.seconds,
        "ratio_to_bound": found.planned.ratio_to_exposed_bound,
        "work_lower_bound_s": found.planned.bound.seconds,
        "memory": {
            "gpu_peak_bytes": found.memory.gpu_bytes,
            "host_bytes": found.memory.host_bytes,
            "pinned_bytes": found.memory.pinned_bytes,
        },
        "placement": {placement.value: placements.count(placement) for placement in Placement},
        "deepspeed_config": deepspeed_config(found, inputs),
    }


def deepspeed_config(found: Forecast, inputs: Inputs) -> dict[str, Any]:
    """What the plan needs of the DeepSpeed config; training measures and plans anew, on the machine that trains."""
    block: dict[str, Any] = {"placement": "planned"}
    if inputs.profile_path is not None:
        block["profile"] = str(inputs.profile_path.resolve())
    if inputs.profile.has_accelerator:
        # What this plan takes, up to the next tenth; less is taken where nothing is said.
        block["gpu_memory_gb"] = ceil(10 * found.planned.memory.gpu_bytes / GB) / 10
    if not inputs.overlap.backward:
        block["overlap_backward"] = False
    if not inputs.overlap.forward:
        block["overlap_forward"] = False
    return {
        "train_micro_batch_size_per_gpu": found.job.micro_batch,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "sub_group_size": found.sub_group_size,
        },
        "deep_optimizer_states": block,
    }


def _arm(arm: Arm, found: Forecast) -> dict[str, Any]:
    """The same keys for an arm that cannot run, without values, and why."""
    if isinstance(arm, Unfit):
        return {**dict.fromkeys(found.predicted.to_json_dict()), "why": arm.why}
    return arm.to_json_dict()


def _print_screen(found: Forecast, inputs: Inputs) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    job, plan = found.job, found.planned.plan
    count = len(plan.placements)
    say(
        f"{job.shape.name} ({billions(job.shape.numel)} parameters) on {job.world_size} x {_machine(inputs)}, "
        f"{billions(plan.workload.numel)} a rank, {count} sub-groups of "
        f'{plan.workload.numel / count / 1e6:,.0f} M ("sub_group_size": {found.sub_group_size:,})'
    )
    split = "   ".join(f"{its.value} {plan.placements.count(its)}" for its in Placement)
    say(f"{_origin(inputs)}\n\n  update   {split}   {plan.schedule.num_slots} slots\n")
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for header in ("", "forward", "backward", "exposed", "+ hidden", "iteration", "tokens/s", "MFU"):
        table.add_column(header, justify="right" if header else "left", no_wrap=True)
    unfit = []
    for name, arm in {"this plan": found.predicted, **found.baselines}.items():
        title = NAMES.get(name, name)
        if isinstance(arm, Unfit):
            unfit.append(f"{title}: {arm.why}")
            continue
        table.add_row(
            Text(title),
            *map(seconds, (arm.forward_s, arm.backward_s, arm.exposed_update_s)),
            seconds(arm.hidden_update_s),
            seconds(arm.iteration_s),
            f"{arm.tokens_per_s:,.0f}",
            "-" if arm.mfu is None else percent(arm.mfu),
        )
    console.print(table)
    for line in unfit:
        say(line)
    say(f"\n{_bounds(found)}")
    say(f"memory: {_memory(found, inputs)}\n")
    if inputs.profile.has_accelerator:
        say("No GPU has been measured against this yet: training says at its end what was predicted and measured.\n")
    say("Paste into your DeepSpeed config:")
    say(json.dumps(deepspeed_config(found, inputs), indent=2))


def _bounds(found: Forecast) -> str:
    """What no schedule can beat: of what is exposed, with the windows there are, and of the whole work."""
    planned = found.planned
    lines = [(_windows(found.windows), planned.exposed_bound, planned.ratio_to_exposed_bound)]
    if found.windows != Windows():
        lines.append(("exposed and hidden together", planned.bound, planned.ratio_to_bound))
    return "\n".join(
        f"lower bound of the update, {of_what}: {seconds(bound.seconds)} ({bound.binding.value} binds); "
        f"this plan is at {ratio:.2f} of it"
        for of_what, bound, ratio in lines
    )


def _windows(windows: Windows) -> str:
    """What is bounded: the part that these windows cannot hide."""
    hiding = [
        *([f"{seconds(windows.backward_s)} of backward"] if windows.backward_s > 0 else []),
        *([f"{seconds(windows.forward_s)} of the next forward"] if windows.forward_s > 0 else []),
    ]
    return f"exposed in spite of {' and '.join(hiding)} to hide it" if hiding else "all of it exposed"


def _machine(inputs: Inputs) -> str:
    return inputs.profile.provenance.gpu or f"{inputs.profile.provenance.cpu or inputs.profile.name} (no GPU)"


def _origin(inputs: Inputs) -> str:
    """Where the figures are from, and whether as many ranks shared the machine as will."""
    profiled, ranks = inputs.profile.provenance, inputs.job.ranks_of_a_node
    if profiled.source != "measured":
        return profiled.source
    shared = "" if profiled.ranks == ranks else f"; with {profiled.ranks} ranks at once, while {ranks} will train"
    return f"measured on {profiled.host}, {profiled.date}{shared}"


def _memory(found: Forecast, inputs: Inputs) -> str:
    """By kind, against its limit: of one GPU, and of one node."""
    limits, ranks = inputs.limits, found.job.ranks_of_a_node
    pinned = None if limits.pinned is None else limits.pinned * ranks
    kinds = (
        *([("GPU", found.memory.gpu_bytes, limits.gpu)] if inputs.profile.has_accelerator else []),
        ("host", found.memory.host_bytes, limits.host),
        ("of which pinned", found.memory.pinned_bytes, pinned),
    )
    return "   ".join(
        f"{name} {gigabytes(taken)} of {'no limit' if limit is None else gigabytes(limit)}"
        for name, taken, limit in kinds
    )
