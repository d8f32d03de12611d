"""Write a plan as JSON, and form the block for the DeepSpeed config."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, fields
from typing import Any

from perf_model.cli.explanation import busy_s, rule_of
from perf_model.cli.inputs import Inputs
from perf_model.cli.planning_commands import installed_version
from perf_model.schedule.host_layout import KEYS_OF_STATES
from perf_model.schedule.lowering import forward_order
from perf_model.schedule.placement import Placement
from perf_model.training_run.forecast import Forecast, Infeasible, Outcome
from perf_model.training_run.job import Job
from perf_model.training_run.micro_batch import PARAM_BYTES
from perf_model.units import GB

NVME_PATH = "a folder on a local disk"

FORMAT = 3
"""The version of the JSON format, which changes if a key is removed or its meaning changes."""


def to_json_dict(found: Forecast, inputs: Inputs) -> dict[str, Any]:
    """Return the forecast as ``--json`` prints it: seconds and bytes."""
    plan, memory, windows = found.planned.plan, found.memory, found.windows
    return {
        "versions": {"format": FORMAT, "deep_opt_states": installed_version(), "python": platform.python_version()},
        "inputs": _inputs(found, inputs),
        "predicted": _outcome(found.predicted, found),
        "baselines": {name: _outcome(outcome, found) for name, outcome in found.baselines.items()},
        "work_lower_bound_s": found.bound.seconds,
        "ratio_to_work_bound": found.planned.update_s / found.bound.seconds,
        "busy_s": {resource.value: of_one_s for resource, of_one_s in busy_s(found).items()},
        "memory": {
            "gpu_peak_bytes": memory.gpu_bytes,
            "host_bytes": memory.host_bytes,
            "reserved_host_bytes": found.reserved_host_bytes,
            "pinned_bytes": memory.pinned_bytes,
            "eager_bytes": memory.eager_bytes,
            "disk_bytes": found.disk_bytes,
            "no_offload_bytes": found.no_offload_bytes,
        },
        "placement": {placement.value: plan.placements.count(placement) for placement in Placement},
        "units": [
            {
                "index": unit.index,
                "ranges": [[run.sub_group, run.begin, run.numel] for run in unit.ranges],
                "numel": unit.numel,
                "forward_numel": unit.forward_numel,
                "label": unit.label,
                "placement": placement.value,
                "eager": unit.index in plan.eager,
                "on_disk": unit.is_on_disk,
                "rule": rule_of(unit, found.job) or None,
            }
            for unit, placement in zip(plan.workload.units, plan.placements, strict=True)
        ],
        "order": {
            "update": list(plan.order or forward_order(plan.workload, plan.placements)),
            "first_use": [unit.index for unit in plan.workload.in_order_of_use],
        },
        "num_slots": plan.num_slots,
        "unit_size": found.planned.unit_size,
        "windows": {
            "backward_s": windows.backward_s,
            "forward_s": windows.forward_s,
            "cpu_slowdown": windows.slowdown.cpu,
        },
        "budgets": asdict(found.budgets),
        "plan": found.planned.to_json_dict(),
        "deepspeed_config": deepspeed_config(found, inputs),
    }


def _inputs(found: Forecast, inputs: Inputs) -> dict[str, Any]:
    job, shape = inputs.job, inputs.job.shape
    return {
        "model": {
            "option": inputs.model,
            "numel": shape.numel,
            "active_numel": shape.active_numel,
            "shape": asdict(shape),
        },
        "job": {key: getattr(job, key) for field in fields(Job) if (key := field.name) not in ("shape", "rules")},
        "rules": job.rules.to_json(),
        "machine": json.loads(inputs.profile.to_json()),
        "machine_path": None if inputs.profile_path is None else str(inputs.profile_path),
        "limits": asdict(inputs.limits),
        "overlap": asdict(inputs.overlap),
        "overheads": asdict(found.overheads),
        "unit_sizes": list(inputs.unit_sizes),
        "given": sorted(inputs.given),
    }


def deepspeed_config(found: Forecast, inputs: Inputs) -> dict[str, Any]:
    """Return the part of the DeepSpeed config that the plan needs."""
    # Training plans again, unless rules place everything. Then unit size and number of slots are included.
    job, plan, given, overlap = found.job, found.planned.plan, inputs.given, inputs.overlap
    planned = any(unit.fixed is None for unit in plan.workload.units)
    block: dict[str, Any] = {"placement": job.rules.to_json() or "planned"}
    if "unit_size" in given or not planned:
        block["unit_size"] = found.planned.unit_size
    # Rules without a last one for all names may leave parameters to the planner, which then refuses the key.
    if job.rules.rules and not job.rules.may_plan:
        block["num_slots"] = plan.num_slots
    if inputs.profile_path is not None:
        block["profile"] = str(inputs.profile_path.resolve())
    # The options are the memory of GPU and machine, and the keys the part of it that training leaves to the optimizer.
    if "gpu_memory_gb" in given and planned and found.budgets.gpu_bytes is not None:
        block["gpu_memory_gb"] = found.budgets.gpu_bytes / GB
    if found.disk_bytes and "host_memory_gb" in given and found.budgets.host_bytes is not None:
        # In ``setup``, the rounded masters are the trained parameters if these are offloaded.
        trained = plan.workload.numel if job.offload_param and job.setup.widths.rounds else 0
        host_bytes = found.budgets.host_bytes - PARAM_BYTES * trained
        block["host_memory_gb"] = host_bytes * job.ranks_on_node / GB
    if planned and inputs.limits.eager == 0:
        block["eager"] = False
    if "gpu_memory_margin_gb" in given and planned:
        block["gpu_memory_margin_gb"] = inputs.limits.gpu_margin / GB
    block |= {f"overlap_{phase}": False for phase, overlaps in asdict(overlap).items() if not overlaps}
    return {
        "train_micro_batch_size_per_gpu": job.micro_batch,
        **({"tensor_parallel": {"autotp_size": job.tensor_parallel}} if job.tensor_parallel > 1 else {}),
        **({"gradient_accumulation_steps": job.accumulation} if job.accumulation > 1 else {}),
        "bf16": {"enabled": True, **dict.fromkeys(KEYS_OF_STATES[job.states], True)},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "nvme", "nvme_path": NVME_PATH} if found.disk_bytes else {"device": "cpu"},
            **({"offload_param": {"device": "cpu"}} if job.offload_param else {}),
            **({"sub_group_size": job.sub_group_size} if "sub_group_size" in given else {}),
        },
        "deep_optimizer_states": block,
    }


def _outcome(outcome: Outcome, found: Forecast) -> dict[str, Any]:
    speed_up = {"speed_up": found.speed_up(outcome)}
    if isinstance(outcome, Infeasible):
        return {**dict.fromkeys(found.predicted.to_json_dict()), **speed_up, "why": outcome.reason}
    return {**outcome.to_json_dict(), **speed_up}
