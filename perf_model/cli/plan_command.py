"""Print the plan: the placements, the predicted iteration next to the alternatives, and the JSON block to paste."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from perf_model.cli.inputs import Inputs, read_inputs
from perf_model.cli.unit_runs import unit_runs
from perf_model.prediction.overlap_windows import Windows
from perf_model.schedule.placement import Placement
from perf_model.training_run.forecast import Forecast, Infeasible, Outcome
from perf_model.units import GB, billions, gigabytes, percent, seconds

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

WHY = "why: the rule; otherwise, by how much the exposed time changes if one unit of the row has another placement"


def run(options: argparse.Namespace) -> int:
    """Print the plan, and return the exit code."""
    inputs = read_inputs(options, options.world_size, options.micro_batch)
    found = inputs.forecast()
    if options.json:
        print(json.dumps(to_json_dict(found, inputs), indent=2))
    else:
        _print_screen(found, inputs)
    return 0


def to_json_dict(found: Forecast, inputs: Inputs) -> dict[str, Any]:
    """Return the forecast as ``--json`` prints it: seconds and bytes."""
    placements = found.planned.plan.placements
    units = [
        {
            "index": unit.index,
            "sub_group": unit.sub_group,
            "begin": unit.begin,
            "numel": unit.numel,
            "label": unit.label,
            "placement": run.placement.value,
            "why": run.why,
        }
        for run in unit_runs(found)
        for unit in run.units
    ]
    return {
        "predicted": found.predicted.to_json_dict(),
        "baselines": {name: _outcome(outcome, found) for name, outcome in found.baselines.items()},
        "lower_bound_s": found.planned.exposed_bound.seconds,
        "ratio_to_bound": found.planned.ratio_to_exposed_bound,
        "work_lower_bound_s": found.planned.bound.seconds,
        "memory": {
            "gpu_peak_bytes": found.memory.gpu_bytes,
            "host_bytes": found.memory.host_bytes,
            "reserved_host_bytes": found.reserved_host_bytes,
            "pinned_bytes": found.memory.pinned_bytes,
        },
        "placement": {placement.value: placements.count(placement) for placement in Placement},
        "units": units,
        "windows": {"backward_s": found.windows.backward_s, "forward_s": found.windows.forward_s},
        "budgets": asdict(found.budgets),
        "plan": found.chosen.to_json_dict(),
        "deepspeed_config": deepspeed_config(found, inputs),
    }


def deepspeed_config(found: Forecast, inputs: Inputs) -> dict[str, Any]:
    """Return the part of the DeepSpeed config that the plan needs.

    It does not contain the choices of the planner: training makes them in the same way. If rules leave nothing to the
    planner, training does not plan, and the size of the units and the number of slots are those of this plan.
    """
    job, plan = found.job, found.planned.plan
    block: dict[str, Any] = {"placement": job.rules.to_json() or "planned"}
    planned = any(unit.fixed is None for unit in plan.workload.units)
    if "unit_size" in inputs.given or not planned:
        block["unit_size"] = found.unit_size
    if not planned:
        block["num_slots"] = plan.num_slots
    if inputs.profile_path is not None:
        block["profile"] = str(inputs.profile_path.resolve())
    if "gpu_memory_gb" in inputs.given and planned and found.budgets.gpu_bytes is not None:
        # The option is the memory of the GPU, and the key is the part of it that training leaves to the optimizer.
        block["gpu_memory_gb"] = found.budgets.gpu_bytes / GB
    if "gpu_memory_margin_gb" in inputs.given and planned:
        block["gpu_memory_margin_gb"] = inputs.limits.gpu_margin / GB
    if not inputs.overlap.backward:
        block["overlap_backward"] = False
    if not inputs.overlap.forward:
        block["overlap_forward"] = False
    zero: dict[str, Any] = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    if job.offload_param:
        zero["offload_param"] = {"device": "cpu"}
    if "sub_group_size" in inputs.given:
        zero["sub_group_size"] = job.sub_group_size
    return {
        "train_micro_batch_size_per_gpu": job.micro_batch,
        **({"gradient_accumulation_steps": job.accumulation} if job.accumulation > 1 else {}),
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "deep_optimizer_states": block,
    }


def _outcome(outcome: Outcome, found: Forecast) -> dict[str, Any]:
    """Return the figures; where the alternative cannot run, the same keys without values, and the reason."""
    if isinstance(outcome, Infeasible):
        return {**dict.fromkeys(found.predicted.to_json_dict()), "why": outcome.reason}
    return outcome.to_json_dict()


def _print_screen(found: Forecast, inputs: Inputs) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()

    def show(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    job, plan = found.job, found.planned.plan
    count = len(plan.placements)
    show(
        f"{job.shape.description} on {job.world_size} x {_machine(inputs)}, "
        f"{billions(plan.workload.numel)} per rank, {count} units of {plan.workload.numel / count / 1e6:,.0f} M, "
        f"at most {found.unit_size / 1e6:,.0f} M"
    )
    if job.shape.source:
        show(f"model: {job.shape.source}")
    counts = "   ".join(f"{placement.value} {plan.placements.count(placement)}" for placement in Placement)
    show(f"{_origin(inputs)}\n\n  update   {counts}   {plan.schedule.num_slots} slots\n")
    units = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for header in ("units", "layers", "parameters", "placement", "why"):
        units.add_column(header, justify="right" if header == "parameters" else "left", overflow="fold")
    runs = unit_runs(found)
    for run in runs[:MAX_ROWS]:
        # Text, because the pattern of a rule may contain square brackets, which are markup in a str.
        units.add_row(*map(Text, (run.indices, run.layers, _millions(run.numel), run.placement.value, run.why)))
    console.print(units)
    if len(runs) > MAX_ROWS:
        show(f"... and {len(runs) - MAX_ROWS} more rows; --json has every unit, and explain has a row per size")
    show(f"{WHY}\n")
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for header in ("", "forward", "backward", "exposed", "+ hidden", "fixed", "iteration", "tokens/s", "MFU"):
        table.add_column(header, justify="right" if header else "left", no_wrap=True)
    infeasible = []
    for name, outcome in {"this plan": found.predicted, **found.baselines}.items():
        title = TITLES.get(name, name)
        if isinstance(outcome, Infeasible):
            infeasible.append(f"{title}: {outcome.reason}")
            continue
        table.add_row(
            Text(title),
            *map(seconds, (outcome.forward_s, outcome.backward_s, outcome.exposed_update_s)),
            seconds(outcome.hidden_update_s),
            seconds(outcome.fixed_s),
            seconds(outcome.iteration_s),
            f"{outcome.tokens_per_s:,.0f}",
            "-" if outcome.mfu is None else percent(outcome.mfu),
        )
    console.print(table)
    for line in infeasible:
        show(line)
    show(f"\n{_bounds(found)}")
    show(f"memory: {_memory(found, inputs)}\n")
    if inputs.profile.has_accelerator:
        show(
            "These predictions have not been compared with measurements on a GPU yet. At its end, training logs the "
            "predicted and the measured times.\n"
        )
    show("Paste into your DeepSpeed config:")
    show(json.dumps(deepspeed_config(found, inputs), indent=2))


def _millions(numel: int) -> str:
    return f"{numel / 1e6:,.1f} M"


def _bounds(found: Forecast) -> str:
    """Return one line per lower bound: of the exposed time in these windows, and of all the work."""
    planned = found.planned
    lines = [(_exposed_time(found.windows), planned.exposed_bound, planned.ratio_to_exposed_bound)]
    if found.windows != Windows():
        lines.append(("exposed and hidden time together", planned.bound, planned.ratio_to_bound))
    return "\n".join(
        f"lower bound of the update, {bounded}: {seconds(bound.seconds)} (limited by {bound.binding.value}); "
        f"this plan takes {ratio:.2f} times as long"
        for bounded, bound, ratio in lines
    )


def _exposed_time(windows: Windows) -> str:
    """Describe the exposed time that is bounded, by the windows that may hide the rest."""
    available = [
        *([f"{seconds(windows.backward_s)} backward"] if windows.backward_s > 0 else []),
        *([f"{seconds(windows.forward_s)} next forward"] if windows.forward_s > 0 else []),
    ]
    return (
        f"exposed time that cannot be hidden ({', '.join(available)} available)" if available else "all of it exposed"
    )


def _machine(inputs: Inputs) -> str:
    return inputs.profile.provenance.gpu or f"{inputs.profile.provenance.cpu or inputs.profile.name} (no GPU)"


def _origin(inputs: Inputs) -> str:
    """Describe the origin of the rates. If the measurement and training have different numbers of ranks, name both."""
    profiled, ranks = inputs.profile.provenance, inputs.job.ranks_on_node
    if profiled.source != "measured":
        return profiled.source
    shared = "" if profiled.ranks == ranks else f"; {profiled.ranks} ranks per node measured, but {ranks} will train"
    return f"measured on {profiled.host}, {profiled.date}{shared}"


def _memory(found: Forecast, inputs: Inputs) -> str:
    """Return each kind of memory with its limit: GPU memory per GPU, the others per node."""
    limits, ranks = inputs.limits, found.job.ranks_on_node
    pinned = None if limits.pinned is None else limits.pinned * ranks
    kinds = (
        *([("GPU", found.memory.gpu_bytes, limits.gpu)] if inputs.profile.has_accelerator else []),
        (
            f"host with {gigabytes(found.reserved_host_bytes)} for the system and processes",
            found.memory.host_bytes,
            limits.host,
        ),
        ("of which pinned", found.memory.pinned_bytes, pinned),
    )
    return "   ".join(
        f"{name} {gigabytes(taken)} of {'no limit' if limit is None else gigabytes(limit)}"
        for name, taken, limit in kinds
    )
