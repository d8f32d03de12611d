"""Compare the parallel layouts of a model on a cluster, and print the DeepSpeed block of the fastest."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from functools import partial
from typing import Any

from perf_model.cli import screen
from perf_model.cli.inputs import read_inputs
from perf_model.cli.plan_command import MAX_ROWS, fixed_seconds
from perf_model.cli.plan_json import deepspeed_config
from perf_model.cluster.layouts import LAYOUT, layouts_of, parts_of, predict_layouts, tensor_parallel_sizes
from perf_model.cluster.pipeline import best_pipeline_layout, megatron_rates
from perf_model.json_input import printable
from perf_model.prediction.hardware import HardwareProfile, Measurement
from perf_model.training_run.forecast import Forecast
from perf_model.training_run.job import Job
from perf_model.training_run.micro_batch import Overheads
from perf_model.training_run.model import ModelError
from perf_model.units import DIGITS, GB, billions, gigabytes_per_second, percent, seconds, significant

LEAST_CERTAIN, MOST_UNCERTAIN = 0.9 / 1.2, 1.1 / 0.8
"""Times of a speed that the errors of both sides may have: 10 % of Megatron-LM, and 20 % of ZeRO-3."""

COLUMNS = ("t", "d", "micro", "accum.", "iteration", "= compute", "+ network", "+ update", "tokens/s", "MFU")


def run(options: argparse.Namespace) -> int:
    """Print the layouts, and return the exit code, 1 if none fits. Raise ``ModelError`` or ``ProfileError``."""
    without_network = argparse.Namespace(**{**vars(options), "network_gb_per_s": None})
    with screen.progress("Reading"):
        [inputs] = read_inputs(without_network, (options.gpus, 1))
    job, limits, sizes, batch = inputs.job, inputs.limits, options.tensor_parallel_sizes, options.global_batch
    if not inputs.profile.has_accelerator:
        rule = f"profile: must be of a machine with a GPU, found {printable(inputs.profile_path)}, which has none"
        raise ModelError(f"{rule}.\nPlan for another machine.")
    profile, origins = _with_network(inputs.profile, job, options)
    inputs = replace(inputs, profile=profile)
    layouts = layouts_of(job, batch, sizes or tensor_parallel_sizes(job), options.micro_batches)
    with screen.progress("Comparing layouts"):
        fitting, unfit = predict_layouts(layouts, lambda layout: replace(inputs, job=layout).forecast())
        gpu_bytes = math.inf if limits.gpu is None else limits.gpu - limits.gpu_margin
        rates = megatron_rates(profile, job)
        pipeline = None if rates is None else best_pipeline_layout(job, batch, rates, gpu_bytes)
    found: dict[str, Any] = {
        "network": {name: {"value": profile.get(name), "origin": origin} for name, origin in origins.items()},
        "layouts": [
            *(_figures(predicted, options.tokens) for predicted in fitting),
            *({**_sizes(layout), "fits": False, "why": why} for layout, why in unfit),
        ],
        "deepspeed_config": None,
        "megatron": None if pipeline is None else pipeline._asdict(),
    }
    if fitting:
        accumulation = {"gradient_accumulation_steps": fitting[0].job.accumulation}
        found["deepspeed_config"] = deepspeed_config(fitting[0], inputs) | accumulation
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        _print_screen(found, job, batch, profile)
    return 0 if fitting else 1


def _sizes(layout: Job) -> dict[str, int]:
    return {name: getattr(layout, name) for name in LAYOUT}


def _figures(found: Forecast, tokens: float | None) -> dict[str, Any]:
    iteration, job = found.predicted, found.job
    training_s = None if tokens is None else tokens / iteration.tokens_per_s
    return {
        **_sizes(job),
        "fits": True,
        "iteration_s": iteration.iteration_s,
        **parts_of(found),
        "tokens_per_s": iteration.tokens_per_s,
        "mfu": iteration.mfu,
        "days": None if training_s is None else training_s / 86_400,
        "gpu_hours": None if training_s is None else training_s / 3600 * job.world_size,
        "gpu_peak_bytes": found.memory.gpu_bytes,
        "host_bytes_per_node": found.memory.host_bytes,
    }


def _with_network(
    profile: HardwareProfile, job: Job, options: argparse.Namespace
) -> tuple[HardwareProfile, dict[str, str]]:
    """Return the profile with the rates of the network, and their origins. Raise ``ModelError`` if one is missing."""
    known = "measured" if profile.provenance.source == "measured" else "of the preset, not measured"
    nodes, between, inside = job.world_size // job.ranks_on_node, "inter_node_bytes_per_s", "all_gather_bytes_per_s"
    rates: dict[str, float | None] = {}
    origins: dict[str, str] = {}
    for name, option, ranks in ((between, "network_gb_per_s", nodes), (inside, "node_gb_per_s", job.ranks_on_node)):
        if ranks > 1:
            given = getattr(options, option)
            rates[name] = profile.get(name) if given is None else given * GB
            origins[name] = known if given is None else "given, not measured"
    if nodes > 1 and rates[between] is None:
        raise ModelError(
            f"--network-gb-per-s: is needed for {nodes} nodes, because the profile does not have it, found nothing.\n"
            "Give the rate at which a GPU receives from other nodes: 50 with a 400 Gb/s adapter per GPU."
        )
    if inside in rates and rates[inside] is None:
        # Without NVLink, the GPUs of a node communicate over the link to the host.
        rates[inside] = profile.rate("d2h_bytes_per_s")
        origins[inside] = "not measured, assumed to equal the link to the host"
    if inside in rates:
        rates["reduce_scatter_bytes_per_s"] = rates[inside]
    replaced = {name: Measurement(samples=(rate,)) for name, rate in rates.items() if rate is not None}
    return replace(profile, measurements={**profile.measurements, **replaced}), origins


def _print_screen(found: dict[str, Any], job: Job, global_batch: int, profile: HardwareProfile) -> None:
    show = partial(screen.show, soft_wrap=True)
    fitting = [layout for layout in found["layouts"] if layout["fits"]]
    show(
        f"{job.shape.name} ({billions(job.shape.numel)} parameters) on {job.world_size} x "
        f"{profile.provenance.gpu or profile.name}, {job.world_size // job.ranks_on_node} x {job.ranks_on_node}, "
        f"{global_batch} sequences of {job.sequence} tokens per iteration"
    )
    for name, rate in found["network"].items():
        where = "between nodes" if name == "inter_node_bytes_per_s" else "inside a node"
        show(f"network {where}, per GPU: {gigabytes_per_second(rate['value'])}, {rate['origin']}")
    if fitting:
        days = () if fitting[0]["days"] is None else ("days", "gpu_hours")
        headers = (*COLUMNS, *(name.replace("gpu_", "GPU-") for name in days), "host GB", "limited by")
        parts = ("iteration_s", "compute_s", "exposed_network_s", "exposed_update_s")
        rows = [
            (
                *(str(layout[name]) for name in LAYOUT),
                *(seconds(layout[part], DIGITS) for part in parts),
                significant(layout["tokens_per_s"], DIGITS),
                "-" if layout["mfu"] is None else percent(layout["mfu"]),
                *(significant(layout[name], DIGITS) for name in days),
                significant(layout["host_bytes_per_node"] / GB, DIGITS),
                layout["limited_by"],
            )
            for layout in fitting[:MAX_ROWS]
        ]
        show("")
        for table in screen.tables(headers, rows, len(LAYOUT), left=("limited by",)):
            show(table)
        show("t, d: tensor- and data-parallel size; micro: sequences per micro-batch; accum.: micro-batches per step")
    if len(fitting) > MAX_ROWS:
        show(f"... and {len(fitting) - MAX_ROWS} more layouts; --json has all of them")
    for layout in found["layouts"][len(fitting) :]:
        show(f"t = {layout['tensor_parallel']}, micro-batches of {layout['micro_batch']} or more: {layout['why']}")
    if fitting:
        # Table 2 calibrates ZeRO-3 without tensor parallelism.
        alone = [layout for layout in fitting if layout["tensor_parallel"] == 1]
        if (pipeline := found["megatron"]) and alone:
            times = alone[0]["iteration_s"] / pipeline["iteration_s"]
            faster = "about" if LEAST_CERTAIN < times < MOST_UNCERTAIN else f"{significant(times, DIGITS)} times"
            sizes = ", ".join(f"{name.replace('_', ' ')} {pipeline[name]}" for name in list(pipeline)[:6])
            show(f"\nMegatron-LM, with {sizes}, is {faster} as fast as the best with t = 1 above.")
            show(
                "Tables 1 and 2 of arXiv 2104.04473 are predicted within 10 and 20%; the best micro-batch of its "
                "figure 8, 4, is predicted as 1."
            )
        show(f"\nCompute includes the host's time: {fixed_seconds(Overheads.from_profile(profile))}.")
        show("No prediction for a cluster has been compared with a measurement of this project yet.")
        show(f"\nPaste into your DeepSpeed config:\n{json.dumps(found['deepspeed_config'], indent=2)}")
