"""Compare the parallel layouts of a model on a cluster, and print the DeepSpeed block of the fastest."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from perf_model.cli.inputs import Inputs, read_inputs
from perf_model.cli.machine_options import FIGURES, check_figure
from perf_model.cli.plan_command import fixed_seconds
from perf_model.cli.plan_json import deepspeed_config
from perf_model.cluster.layouts import Cluster
from perf_model.cluster.pipeline import PipelineLayout, best_pipeline_layout
from perf_model.cluster.prediction import departures, predict_layouts
from perf_model.json_input import printable
from perf_model.prediction.hardware import HardwareProfile, Measurement
from perf_model.prediction.network import Network
from perf_model.training_run.micro_batch import NO_OVERHEADS, PUBLISHED_OVERHEADS, PhaseRates
from perf_model.training_run.model import ModelError
from perf_model.units import DIGITS, GB, billions, gigabytes_per_second, percent, seconds, significant

MAX_ROWS = 20
"""The most layouts on the screen."""

_INSIDE_A_NODE = ("all_gather_bytes_per_s", "reduce_scatter_bytes_per_s")
_GIVEN = "given, not measured"
COLUMNS = ("t", "d", "micro", "accum.", "fits", "iteration", "= compute", "+ network", "+ update", "tokens/s", "MFU")


def run(options: argparse.Namespace) -> int:
    """Print the layouts, and return the exit code: 1 if none fits into memory.

    Raise ``ModelError`` or ``ProfileError`` for impossible options.
    """
    # The rate of the network may also replace that of a profile, and not only that of a preset.
    without_network = argparse.Namespace(**{**vars(options), "network_gb_per_s": None})
    [inputs] = read_inputs(without_network, (options.gpus, 1))
    job, limits, sizes = inputs.job, inputs.limits, options.tensor_parallel_sizes
    if not inputs.profile.has_accelerator:
        rule = f"profile: must be of a machine with a GPU, found {printable(inputs.profile_path)}, which has none"
        raise ModelError(f"{rule}.\nPlan for another machine.")
    cluster = Cluster(
        shape=job.shape,
        gpus=job.world_size,
        ranks_per_node=job.ranks_per_node,
        global_batch=options.global_batch,
        sequence=options.sequence,
    )
    profile, origins = _with_network(inputs, cluster, options)
    inputs = replace(inputs, profile=profile)
    layouts = cluster.layouts(sizes or cluster.tensor_parallel_sizes(), options.micro_batches)
    fitting, unfit = predict_layouts(job, layouts, profile, limits, inputs.overlap, inputs.unit_sizes)
    rates = PhaseRates.from_profile(profile, cluster.ranks_on_node, NO_OVERHEADS)
    gpu_bytes = None if limits.gpu is None else limits.gpu - limits.gpu_margin
    pipeline = best_pipeline_layout(cluster, job, rates, gpu_bytes, sizes, options.micro_batches)
    config = deepspeed_config(fitting[0].found, inputs) if fitting else None
    if config is not None:
        config["gradient_accumulation_steps"] = fitting[0].layout.accumulation
    compared = {layout.tensor_parallel for layout in (*(found.layout for found in fitting), *unfit)}
    network = Network.from_profile(profile, cluster.ranks_on_node)
    found: dict[str, Any] = {
        "network": {name: {"value": getattr(network, name), "origin": origin} for name, origin in origins.items()},
        "layouts": [
            *(
                {
                    **predicted.layout._asdict(),
                    "fits": True,
                    "iteration_s": predicted.iteration_s,
                    "compute_s": predicted.compute_s,
                    "exposed_network_s": predicted.network_s,
                    "exposed_update_s": predicted.update_s,
                    "tokens_per_s": predicted.found.predicted.tokens_per_s,
                    "mfu": predicted.found.predicted.mfu,
                    **_durations(options.tokens, predicted.found.predicted.tokens_per_s, cluster.gpus),
                    "gpu_peak_bytes": predicted.found.memory.gpu_bytes,
                    "host_bytes_per_node": predicted.found.memory.host_bytes,
                    "limited_by": predicted.binding,
                }
                for predicted in fitting
            ),
            *({**layout._asdict(), "fits": False, "why": why} for layout, why in unfit.items()),
        ],
        "deepspeed_config": config,
        "departures": departures(fitting, max(cluster.tensor_parallel_sizes()), compared) if fitting else [],
        "megatron": None if pipeline is None else pipeline._asdict(),
    }
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        _print_screen(found, cluster, profile, pipeline)
    return 0 if fitting else 1


def _durations(tokens: float | None, tokens_per_s: float, gpus: int) -> dict[str, float | None]:
    """Return the days and GPU-hours of training on ``tokens``, None if the user gave none."""
    if tokens is None:
        return {"days": None, "gpu_hours": None}
    training_s = tokens / tokens_per_s
    return {"days": training_s / 86_400, "gpu_hours": training_s / 3600 * gpus}


def _with_network(
    inputs: Inputs, cluster: Cluster, options: argparse.Namespace
) -> tuple[HardwareProfile, dict[str, str]]:
    """Return the profile with the rates of the network, and their origins.

    Raise ``ModelError`` if the rate between nodes is needed and neither given nor in the profile.
    """
    profile, rates, origins = inputs.profile, dict[str, float](), {}
    known = "measured" if profile.provenance.source == "measured" else "of the preset, not measured"
    across, inside = options.network_gb_per_s, options.node_gb_per_s
    for option, given in (("--network-gb-per-s", across), ("--node-gb-per-s", inside)):
        if given is not None:
            check_figure(option, given, FIGURES["network_gb_per_s"])
    if cluster.gpus > cluster.ranks_on_node:
        origins["inter_node_bytes_per_s"] = known if across is None else _GIVEN
        if across is not None:
            rates["inter_node_bytes_per_s"] = across * GB
        elif profile.get("inter_node_bytes_per_s") is None:
            raise ModelError(
                f"--network-gb-per-s: is needed for {cluster.gpus // cluster.ranks_on_node} nodes, because the profile "
                "does not have it, found nothing.\nGive the rate at which a GPU receives from other nodes: 50 with a "
                "400 Gb/s adapter per GPU."
            )
    if cluster.ranks_on_node > 1:
        origins["all_gather_bytes_per_s"] = known
        if inside is not None:
            rates |= dict.fromkeys(_INSIDE_A_NODE, inside * GB)
            origins["all_gather_bytes_per_s"] = _GIVEN
        elif profile.get("all_gather_bytes_per_s") is None:
            # Without NVLink, the GPUs of a node communicate over the link to the host.
            rates |= dict.fromkeys(_INSIDE_A_NODE, profile.rate("d2h_bytes_per_s"))
            origins["all_gather_bytes_per_s"] = "not measured, assumed to be that of the link to the host"
    replaced = {name: Measurement(samples=(rate,)) for name, rate in rates.items()}
    return replace(profile, measurements={**profile.measurements, **replaced}), origins


def _print_screen(
    found: dict[str, Any], cluster: Cluster, profile: HardwareProfile, pipeline: PipelineLayout | None
) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()

    def show(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    shape, layouts = cluster.shape, found["layouts"]
    fitting = [layout for layout in layouts if layout["fits"]]
    gpu, nodes = profile.provenance.gpu or profile.name, cluster.gpus // cluster.ranks_on_node
    show(
        f"{shape.name} ({billions(shape.numel)} parameters) on {cluster.gpus} x {gpu}, {nodes} x "
        f"{cluster.ranks_on_node}, {cluster.global_batch} sequences of {cluster.sequence} tokens per iteration"
    )
    for name, rate in found["network"].items():
        where = "between nodes" if name == "inter_node_bytes_per_s" else "inside a node"
        show(f"network {where}, per GPU: {gigabytes_per_second(rate['value'])}, {rate['origin']}")
    if fitting:
        days = () if fitting[0]["days"] is None else ("days", "GPU-hours")
        table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
        for header in (*COLUMNS, *days, "host GB", "limited by"):
            table.add_column(header, justify="left" if header == "limited by" else "right", no_wrap=True)
        for layout in layouts[:MAX_ROWS]:
            table.add_row(*_cells(layout, len(table.columns)))
        # A line that is longer than the terminal is wrapped by it; rich would cut the columns.
        show("")
        Console(width=max(console.width, 130)).print(table)
    if len(layouts) > MAX_ROWS:
        show(f"... and {len(layouts) - MAX_ROWS} more layouts; --json has all of them")
    for layout in layouts[len(fitting) :]:
        show(f"t = {layout['tensor_parallel']}, micro-batches of {layout['micro_batch']} or more: {layout['why']}")
    show(f"\n{_pipeline_line(pipeline, fitting)}")
    for line in found["departures"]:
        show(line)
    if fitting:
        fixed = fixed_seconds(PUBLISHED_OVERHEADS)
        show(f"\nOf each iteration in the table, {fixed}. Iterations of Megatron-LM have none.")
        show("No prediction for a cluster has been compared with a measurement of this project yet.")
        show(f"\nPaste into your DeepSpeed config:\n{json.dumps(found['deepspeed_config'], indent=2)}")


def _cells(layout: dict[str, Any], columns: int) -> Iterable[str]:
    """Return the cells of one row."""
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


def _pipeline_line(layout: PipelineLayout | None, fitting: list[dict[str, Any]]) -> str:
    """Describe the layout of Megatron-LM with a pipeline."""
    rule = "DeepSpeed runs no pipeline with ZeRO-3 (deepspeed/runtime/pipe/engine.py:77)."
    if layout is None:
        return f"{rule} Megatron-LM's pipeline would not fit in any layout that divides the batch and the layers."
    speed = f"{significant(layout.tokens_per_s, DIGITS)} tokens/s"
    if fitting:
        speed += f", {significant(layout.tokens_per_s / fitting[0]['tokens_per_s'], DIGITS)} times the best above"
    return (
        f"{rule} For comparison, Megatron-LM by the formulas of arXiv 2104.04473, with all states on the GPUs: "
        f"t = {layout.tensor_parallel}, p = {layout.stages}, d = {layout.data_parallel}, micro-batch "
        f"{layout.micro_batch}, bubble {percent(layout.bubble)}, {speed}."
    )
