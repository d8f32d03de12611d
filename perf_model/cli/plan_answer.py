"""Answer in sentences what a plan gains: whether training fits without offloading, the speed-ups, and past errors."""

from __future__ import annotations

from perf_model.cli.inputs import Inputs
from perf_model.schedule.placement import Placement
from perf_model.training_run.forecast import Forecast
from perf_model.training_run.micro_batch import Overheads
from perf_model.training_run.predictor import Infeasible
from perf_model.units import DIGITS, percent, seconds, significant, size

LARGER_MODELS = (45, 0.038, 0.168)
"""The number of published runs, and the median and 90th percentile of the absolute relative errors of their iterations
by the rules of ``plan``, with rates that were fitted to smaller models on the same machine. ``python -m benchmarks
published`` measures them."""


def answer(found: Forecast, inputs: Inputs) -> str:
    """Return whether training fits without offloading, and how fast an iteration is with the plan."""
    return f"{_without_offloading(found, inputs)} {_with_plan(found)}"


def past_errors() -> str:
    """Return how far predictions for runs that were not fitted have been off."""
    runs, median, p90 = LARGER_MODELS
    return (
        f"Iterations of {runs} published runs, predicted by the same rules, were off by {percent(median)} in the "
        f"median and by at most {percent(p90)} in nine of ten, with rates fitted to smaller models on the same machine "
        "(python -m benchmarks published). On GPUs of our own (H100, H200), with one model, updates took 1.0 to 1.5 "
        "times as long as predicted. At its end, training logs predicted and measured times."
    )


def fixed_seconds(overheads: Overheads) -> str:
    """Return the fixed seconds of an iteration and of a layer, which no profile measures, and their origin."""
    return (
        f"{seconds(overheads.iteration_s, DIGITS)} are in no phase, and the launches of a layer take at least "
        f"{seconds(overheads.layer_s, DIGITS)} per forward and twice that per backward, as in published runs on "
        "4xH100 and not measured here"
    )


def machine_name(inputs: Inputs) -> str:
    """Return the name of the GPU, or of the CPU if there is no GPU."""
    return inputs.profile.provenance.gpu or f"{inputs.profile.provenance.cpu or inputs.profile.name} (no GPU)"


def _without_offloading(found: Forecast, inputs: Inputs) -> str:
    outcome, limits = found.baselines["no_offload"], inputs.limits
    where = f"on {found.job.world_size} x {machine_name(inputs)} without offloading"
    if Placement.STREAMED not in found.cost.placements and isinstance(outcome, Infeasible):
        return f"Training {where} is not predicted: {outcome.reason}."
    limit = "unlimited memory" if limits.gpu is None else size(max(0, limits.gpu - limits.gpu_margin))
    need = f"{size(found.no_offload_bytes, DIGITS)} of {limit} per GPU"
    if isinstance(outcome, Infeasible):
        return f"{found.job.shape.name} does not fit {where} ({need})."
    return f"{found.job.shape.name} fits {where} ({need}, {seconds(outcome.iteration_s, DIGITS)} per iteration)."


def _with_plan(found: Forecast) -> str:
    taken = f"With this plan, an iteration takes {seconds(found.predicted.iteration_s, DIGITS)}"
    compared = [
        f"{significant(outcome.iteration_s / found.predicted.iteration_s, DIGITS)} times as fast as {name}"
        for name, outcome in (
            ("without offloading", found.baselines["no_offload"]),
            ("with stock DeepSpeed's offload", found.baselines["stock"]),
        )
        if not isinstance(outcome, Infeasible)
    ]
    if isinstance(found.baselines["stock"], Infeasible):
        compared.append("stock DeepSpeed's offload cannot run")
    return f"{taken}: {', and '.join(compared)}."
