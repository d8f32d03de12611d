"""Compare the parallel layouts of a model on a cluster, and print the DeepSpeed block of the fastest."""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import replace
from functools import partial
from typing import Any

from perf_model.cli import screen
from perf_model.cli.inputs import read_inputs
from perf_model.cli.machine_options import FIGURES, check_figure
from perf_model.cli.plan_command import fixed_seconds
from perf_model.cli.plan_json import deepspeed_config
from perf_model.cli.screen import new_table
from perf_model.cluster.layouts import LayoutPrediction, departures, layouts_of, predict_layouts, tensor_parallel_sizes
from perf_model.cluster.pipeline import best_pipeline_layout
from perf_model.json_input import printable
from perf_model.prediction.hardware import HardwareProfile, Measurement
from perf_model.training_run.job import Job
from perf_model.training_run.micro_batch import NO_OVERHEADS, PUBLISHED_OVERHEADS, PhaseRates
from perf_model.training_run.model import ModelError
from perf_model.units import DIGITS, GB, billions, gigabytes_per_second, percent, seconds, significant

MAX_ROWS = 20

COLUMNS = ("t", "d", "micro", "accum.", "fits", "iteration", "= compute", "+ network", "+ update", "tokens/s", "MFU")

PIPELINE = (
    "For comparison, Megatron-LM by the formulas of arXiv 2104.04473, with all states on the GPUs: "
    "t = {tensor_parallel}, p = {stages}, d = {data_parallel}, micro-batch {micro_batch}, bubble {bubble:.0%}, "
)


def run(options: argparse.Namespace) -> int:
    """Print the layouts, and return the exit code: 1 if none fits into memory.

    Raise ``ModelError`` or ``ProfileError``.
    """
    without_network = argparse.Namespace(**{**vars(options), "network_gb_per_s": None})
    [inputs] = read_inputs(without_network, (options.gpus, 1))
    job, limits, sizes, batch = inputs.job, inputs.limits, options.tensor_parallel_sizes, options.global_batch
    if not inputs.profile.has_accelerator:
        rule = f"profile: must be of a machine with a GPU, found {printable(inputs.profile_path)}, which has none"
        raise ModelError(f"{rule}.\nPlan for another machine.")
    profile, origins = _with_network(inputs.profile, job, options)
    layouts = layouts_of(job, batch, sizes or tensor_parallel_sizes(job), options.micro_batches)
    fitting, unfit = predict_layouts(job, layouts, profile, limits, inputs.overlap, inputs.unit_sizes)
    rates = PhaseRates.from_profile(profile, job.ranks_on_node, NO_OVERHEADS)
    gpu_bytes = None if limits.gpu is None else limits.gpu - limits.gpu_margin
    pipeline = best_pipeline_layout(job, batch, rates, gpu_bytes, sizes, options.micro_batches)
    compared = {layout.tensor_parallel for layout in layouts}
    found: dict[str, Any] = {
        "network": {name: {"value": profile.get(name), "origin": origin} for name, origin in origins.items()},
        "layouts": [
            *(_figures(predicted, options.tokens, job.world_size) for predicted in fitting),
            *({**layout._asdict(), "fits": False, "why": why} for layout, why in unfit.items()),
        ],
        "deepspeed_config": None,
        "departures": departures(fitting, max(tensor_parallel_sizes(job)), compared) if fitting else [],
        "megatron": None if pipeline is None else pipeline._asdict(),
    }
    if fitting:
        accumulation = {"gradient_accumulation_steps": fitting[0].layout.accumulation}
        found["deepspeed_config"] = deepspeed_config(fitting[0].found, replace(inputs, profile=profile)) | accumulation
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        _print_screen(found, job, batch, profile)
    return 0 if fitting else 1


def _figures(predicted: LayoutPrediction, tokens: float | None, gpus: int) -> dict[str, Any]:
    iteration, memory = predicted.found.predicted, predicted.found.memory
    training_s = None if tokens is None else tokens / iteration.tokens_per_s
    return {
        **predicted.layout._asdict(),
        "fits": True,
        "iteration_s": predicted.iteration_s,
        **predicted.parts_s,
        "tokens_per_s": iteration.tokens_per_s,
        "mfu": iteration.mfu,
        "days": None if training_s is None else training_s / 86_400,
        "gpu_hours": None if training_s is None else training_s / 3600 * gpus,
        "gpu_peak_bytes": memory.gpu_bytes,
        "host_bytes_per_node": memory.host_bytes,
        "limited_by": predicted.binding,
    }


def _with_network(
    profile: HardwareProfile, job: Job, options: argparse.Namespace
) -> tuple[HardwareProfile, dict[str, str]]:
    """Return the profile with the rates of the network, and their origins.

    Raise ``ModelError`` if a rate is missing.
    """
    for name in ("network_gb_per_s", "node_gb_per_s"):
        if (given := getattr(options, name)) is not None:
            check_figure(f"--{name.replace('_', '-')}", given, FIGURES["network_gb_per_s"])
    known = "measured" if profile.provenance.source == "measured" else "of the preset, not measured"
    rates: dict[str, float] = {}
    origins: dict[str, str] = {}

    def find(name: str, given: float | None) -> bool:
        origins[name] = known if given is None else "given, not measured"
        rates.update({} if given is None else {name: given * GB})
        return given is not None or profile.get(name) is not None

    nodes = job.world_size // job.ranks_on_node
    if nodes > 1 and not find("inter_node_bytes_per_s", options.network_gb_per_s):
        raise ModelError(
            f"--network-gb-per-s: is needed for {nodes} nodes, because the profile does not have it, found nothing.\n"
            "Give the rate at which a GPU receives from other nodes: 50 with a 400 Gb/s adapter per GPU."
        )
    inside = "all_gather_bytes_per_s"
    if job.ranks_on_node > 1 and not find(inside, options.node_gb_per_s):
        # Without NVLink, the GPUs of a node communicate over the link to the host.
        rates[inside] = profile.rate("d2h_bytes_per_s")
        origins[inside] = "not measured, assumed to be that of the link to the host"
    if inside in rates:
        rates["reduce_scatter_bytes_per_s"] = rates[inside]
    replaced = {name: Measurement(samples=(rate,)) for name, rate in rates.items()}
    return replace(profile, measurements={**profile.measurements, **replaced}), origins


def _print_screen(found: dict[str, Any], job: Job, global_batch: int, profile: HardwareProfile) -> None:
    show = partial(screen.show, soft_wrap=True)
    layouts, pipeline = found["layouts"], found["megatron"]
    fitting = [layout for layout in layouts if layout["fits"]]
    show(
        f"{job.shape.name} ({billions(job.shape.numel)} parameters) on {job.world_size} x "
        f"{profile.provenance.gpu or profile.name}, {job.world_size // job.ranks_on_node} x {job.ranks_on_node}, "
        f"{global_batch} sequences of {job.sequence} tokens per iteration"
    )
    for name, rate in found["network"].items():
        where = "between nodes" if name == "inter_node_bytes_per_s" else "inside a node"
        show(f"network {where}, per GPU: {gigabytes_per_second(rate['value'])}, {rate['origin']}")
    if fitting:
        days = () if fitting[0]["days"] is None else ("days", "GPU-hours")
        table = new_table((*COLUMNS, *days, "host GB", "limited by"), left=("limited by",))
        for layout in layouts[:MAX_ROWS]:
            table.add_row(*_cells(layout, len(table.columns)))
        # A line that is longer than the terminal is wrapped by it; rich would cut the columns.
        show("")
        screen.show(table, width=max(shutil.get_terminal_size().columns, 130))
    if len(layouts) > MAX_ROWS:
        show(f"... and {len(layouts) - MAX_ROWS} more layouts; --json has all of them")
    for layout in layouts[len(fitting) :]:
        show(f"t = {layout['tensor_parallel']}, micro-batches of {layout['micro_batch']} or more: {layout['why']}")
    megatron = "Megatron-LM's pipeline would not fit in any layout that divides the batch and the layers"
    if pipeline is not None:
        megatron = PIPELINE.format(**pipeline) + f"{significant(pipeline['tokens_per_s'], DIGITS)} tokens/s"
        if fitting:
            times = pipeline["tokens_per_s"] / fitting[0]["tokens_per_s"]
            megatron += f", {significant(times, DIGITS)} times the best above"
    show(f"\nDeepSpeed runs no pipeline with ZeRO-3 (deepspeed/runtime/pipe/engine.py:77). {megatron}.")
    for line in found["departures"]:
        show(line)
    if fitting:
        fixed = fixed_seconds(PUBLISHED_OVERHEADS)
        show(f"\nOf each iteration in the table, {fixed}. Iterations of Megatron-LM have none.")
        show("No prediction for a cluster has been compared with a measurement of this project yet.")
        show(f"\nPaste into your DeepSpeed config:\n{json.dumps(found['deepspeed_config'], indent=2)}")


def _cells(layout: dict[str, Any], columns: int) -> list[str]:
    sizes = [str(size) for size in list(layout.values())[:4]]
    if not layout["fits"]:
        return [*sizes, "no", *[""] * (columns - 6), "memory"]
    parts = ("iteration_s", "compute_s", "exposed_network_s", "exposed_update_s")
    days = [] if layout["days"] is None else [layout["days"], layout["gpu_hours"]]
    return [
        *sizes,
        "yes",
        *(seconds(layout[part], DIGITS) for part in parts),
        significant(layout["tokens_per_s"], DIGITS),
        "-" if layout["mfu"] is None else percent(layout["mfu"]),
        *(significant(value, DIGITS) for value in days),
        significant(layout["host_bytes_per_node"] / GB, DIGITS),
        layout["limited_by"],
    ]
