"""Compare the parallel layouts of a model on a cluster, and print the DeepSpeed block of the fastest."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from perf_model.cli.inputs import Inputs, read_inputs
from perf_model.cli.machine_options import FIGURES, check_figure
from perf_model.cli.plan_answer import fixed_seconds
from perf_model.cli.plan_json import deepspeed_config
from perf_model.cluster.layouts import Cluster, Layout
from perf_model.cluster.megatron_layout import PipelineLayout, best_pipeline_layout
from perf_model.cluster.prediction import LayoutPrediction, UnfitLayout, predict_layouts
from perf_model.cluster.takeaways import departures
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
COLUMNS_OF_TOKENS = ("days", "GPU-hours")
LAST_COLUMNS = ("host GB", "limited by")


@dataclass(frozen=True, kw_only=True)
class LayoutComparison:
    """The layouts of a cluster, the fastest first, and those that do not fit into memory.

    ``network`` has the rates that the predictions use, and ``origins`` describe where they are from. ``tokens`` is
    None if no training length was given.
    """

    cluster: Cluster
    inputs: Inputs
    network: Network
    origins: dict[str, str]
    tokens: float | None
    fitting: list[LayoutPrediction]
    unfit: list[UnfitLayout]
    pipeline: PipelineLayout | None

    @property
    def best(self) -> LayoutPrediction:
        """Return the fastest layout."""
        return self.fitting[0]

    @property
    def departures(self) -> list[str]:
        """Return where the fastest layout departs from the takeaways of the Megatron paper."""
        layouts = [*(found.layout for found in self.fitting), *(found.layout for found in self.unfit)]
        compared = {layout.tensor_parallel for layout in layouts}
        return departures(self.fitting, max(self.cluster.tensor_parallel_sizes()), compared)


def run(options: argparse.Namespace) -> int:
    """Print the layouts, and return the exit code: 1 if none fits into memory."""
    compared = compare(options)
    if options.json:
        print(json.dumps(to_json_dict(compared), indent=2))
    else:
        _print_screen(compared)
    return 0 if compared.fitting else 1


def compare(options: argparse.Namespace) -> LayoutComparison:
    """Return the comparison that ``options`` describe. Raise ``ModelError`` or ``ProfileError`` for impossible ones."""
    # The rate of the network may replace that of a profile, too, and not only that of a preset.
    without_network = argparse.Namespace(**{**vars(options), "network_gb_per_s": None})
    inputs = read_inputs(without_network, options.gpus, micro_batch=1)
    if not inputs.profile.has_accelerator:
        rule = f"profile: must be of a machine with a GPU, found {printable(inputs.profile_path)}, which has none"
        raise ModelError(f"{rule}.\nPlan for another machine.")
    cluster = Cluster(
        shape=inputs.job.shape,
        gpus=inputs.job.world_size,
        ranks_per_node=inputs.job.ranks_per_node,
        global_batch=options.global_batch,
        sequence=options.sequence,
    )
    profile, origins = _with_network(inputs, cluster, options)
    inputs = replace(inputs, profile=profile)
    layouts = cluster.layouts(options.tensor_parallel_sizes or cluster.tensor_parallel_sizes(), options.micro_batches)
    fitting, unfit = predict_layouts(inputs.job, layouts, profile, inputs.limits, inputs.overlap, inputs.unit_sizes)
    network = Network.from_profile(profile, cluster.ranks_on_node)
    return LayoutComparison(
        cluster=cluster,
        inputs=inputs,
        network=network,
        origins=origins,
        tokens=options.tokens,
        fitting=fitting,
        unfit=unfit,
        pipeline=best_pipeline_layout(
            cluster,
            inputs.job,
            PhaseRates.from_profile(profile, cluster.ranks_on_node, NO_OVERHEADS),
            None if inputs.limits.gpu is None else inputs.limits.gpu - inputs.limits.gpu_margin,
            options.tensor_parallel_sizes,
            options.micro_batches,
        ),
    )


def _with_network(
    inputs: Inputs, cluster: Cluster, options: argparse.Namespace
) -> tuple[HardwareProfile, dict[str, str]]:
    """Return the profile with the rates of the network, and their origins.

    Raise ``ModelError`` if the rate between nodes is needed and neither given nor in the profile.
    """
    profile = inputs.profile
    rates: dict[str, float] = {}
    origins = {}
    known = "measured" if profile.provenance.source == "measured" else "of the preset, not measured"
    across, inside = options.network_gb_per_s, options.node_gb_per_s
    for option, given in (("--network-gb-per-s", across), ("--node-gb-per-s", inside)):
        if given is not None:
            check_figure(option, given, FIGURES["network_gb_per_s"])
    if cluster.gpus > cluster.ranks_on_node:
        origins["inter_node_bytes_per_s"] = known
        if across is not None:
            rates["inter_node_bytes_per_s"] = across * GB
            origins["inter_node_bytes_per_s"] = _GIVEN
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


def to_json_dict(compared: LayoutComparison) -> dict[str, Any]:
    """Return the comparison as ``--json`` prints it: seconds and bytes."""
    pipeline = compared.pipeline
    return {
        "network": {
            name: {"value": getattr(compared.network, name), "origin": origin}
            for name, origin in compared.origins.items()
        },
        "layouts": [
            *(_fitting_json(predicted, compared.tokens) for predicted in compared.fitting),
            *({**asdict(unfit.layout), "fits": False, "why": unfit.reason} for unfit in compared.unfit),
        ],
        "deepspeed_config": _deepspeed_config(compared) if compared.fitting else None,
        "departures": compared.departures if compared.fitting else [],
        "megatron": None if pipeline is None else asdict(pipeline),
    }


def _fitting_json(predicted: LayoutPrediction, tokens: float | None) -> dict[str, Any]:
    memory = predicted.found.memory
    return {
        **asdict(predicted.layout),
        "fits": True,
        "iteration_s": predicted.iteration_s,
        "compute_s": predicted.compute_s,
        "exposed_network_s": predicted.network_s,
        "exposed_update_s": predicted.update_s,
        "tokens_per_s": predicted.tokens_per_s,
        "mfu": predicted.mfu,
        "days": None if tokens is None else predicted.days(tokens),
        "gpu_hours": None if tokens is None else predicted.gpu_hours(tokens),
        "gpu_peak_bytes": memory.gpu_bytes,
        "host_bytes_per_node": memory.host_bytes,
        "limited_by": predicted.binding,
    }


def _deepspeed_config(compared: LayoutComparison) -> dict[str, Any]:
    """Return the part of the DeepSpeed config that the fastest layout needs."""
    best = compared.best
    config = deepspeed_config(best.found, compared.inputs)
    config["gradient_accumulation_steps"] = best.layout.accumulation
    return config


def _print_screen(compared: LayoutComparison) -> None:
    from rich.console import Console
    from rich.table import Table

    cluster, tokens = compared.cluster, compared.tokens
    console = Console()

    def show(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    gpu = compared.inputs.profile.provenance.gpu or compared.inputs.profile.name
    nodes = cluster.gpus // cluster.ranks_on_node
    show(
        f"{cluster.shape.name} ({billions(cluster.shape.numel)} parameters) on {cluster.gpus} x {gpu}, {nodes} x "
        f"{cluster.ranks_on_node}, {cluster.global_batch} sequences of {cluster.sequence} tokens per iteration"
    )
    for name, origin in compared.origins.items():
        where = "between nodes, per GPU" if name == "inter_node_bytes_per_s" else "inside a node, per GPU"
        show(f"network {where}: {gigabytes_per_second(getattr(compared.network, name))}, {origin}")
    if compared.fitting:
        headers = (*COLUMNS, *(() if tokens is None else COLUMNS_OF_TOKENS), *LAST_COLUMNS)
        table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
        for header in headers:
            table.add_column(header, justify="left" if header == "limited by" else "right", no_wrap=True)
        for predicted in compared.fitting[:MAX_ROWS]:
            table.add_row(*_cells(predicted, tokens))
        for unfit in compared.unfit[: max(0, MAX_ROWS - len(compared.fitting))]:
            table.add_row(*_sizes(unfit.layout), "no", *[""] * (len(headers) - 6), "memory")
        # A line that is longer than the terminal is wrapped by it; rich would cut the columns.
        show("")
        Console(width=max(console.width, 130)).print(table)
    left_out = len(compared.fitting) + len(compared.unfit) - MAX_ROWS
    if left_out > 0:
        show(f"... and {left_out} more layouts; --json has all of them")
    for unfit in compared.unfit:
        layout = unfit.layout
        show(f"t = {layout.tensor_parallel}, micro-batches of {layout.micro_batch} or more: {unfit.reason}")
    show(f"\n{_pipeline_line(compared)}")
    if not compared.fitting:
        return
    for line in compared.departures:
        show(line)
    show(
        f"\nOf each iteration in the table, {fixed_seconds(PUBLISHED_OVERHEADS)}. Iterations of Megatron-LM have none."
    )
    show("No prediction for a cluster has been compared with a measurement of this project yet.")
    show("\nPaste into your DeepSpeed config:")
    show(json.dumps(_deepspeed_config(compared), indent=2))


def _sizes(layout: Layout) -> list[str]:
    """Return the cells of the first columns."""
    return [str(size) for size in asdict(layout).values()]


def _cells(predicted: LayoutPrediction, tokens: float | None) -> Sequence[str]:
    days: list[str] = []
    if tokens is not None:
        days = [significant(value, DIGITS) for value in (predicted.days(tokens), predicted.gpu_hours(tokens))]
    durations_s = (predicted.iteration_s, predicted.compute_s, predicted.network_s, predicted.update_s)
    return (
        *_sizes(predicted.layout),
        "yes",
        *(seconds(duration_s, DIGITS) for duration_s in durations_s),
        significant(predicted.tokens_per_s, DIGITS),
        "-" if predicted.mfu is None else percent(predicted.mfu),
        *days,
        significant(predicted.found.memory.host_bytes / GB, DIGITS),
        predicted.binding,
    )


def _pipeline_line(compared: LayoutComparison) -> str:
    """Describe the layout of Megatron-LM with a pipeline."""
    rule = "DeepSpeed runs no pipeline with ZeRO-3 (deepspeed/runtime/pipe/engine.py:77)."
    layout = compared.pipeline
    if layout is None:
        return f"{rule} Megatron-LM's pipeline would not fit in any layout that divides the batch and the layers."
    speed = f"{significant(layout.tokens_per_s, DIGITS)} tokens/s"
    ahead = ""
    if compared.fitting:
        times = significant(layout.tokens_per_s / compared.best.tokens_per_s, DIGITS)
        ahead = f", {times} times the best above"
    return (
        f"{rule} For comparison, Megatron-LM by the formulas of arXiv 2104.04473, with all states on the GPUs: "
        f"t = {layout.tensor_parallel}, p = {layout.stages}, d = {layout.data_parallel}, micro-batch "
        f"{layout.micro_batch}, bubble {percent(layout.bubble)}, {speed}{ahead}."
    )
