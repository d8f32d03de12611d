"""Predict forward, backward and the rest of an iteration of published runs, and fit their rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.published.least_squares import FittedRates, Prior, Vector, fit_rates
from benchmarks.published.runs import GPUS_PER_NODE, MeasuredRun
from benchmarks.published.updates import (
    PRESETS,
    VOCAB,
    link_bytes_per_s,
    placements_of,
    updated_parameters,
    workload_of,
)
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import FP32_BYTES
from perf_model.training_run.micro_batch import (
    PARAM_BYTES,
    GradientPath,
    MicroBatch,
    Network,
    Overheads,
    PhaseRates,
)

SEQUENCE = 2048
"""Tokens per sequence of all published runs."""

LAYER_S, REST_S = 0.0046, 0.36
"""Medians of the stock runs of Megatron-DeepSpeed on 4xH100-80GB: ``forward_s`` over layers up to 13B, and
``iteration_s`` less its phases."""

LIMIT_FLOPS_PER_S = {"4xH100-80GB": 480e12, "4xA100-40GB": 190e12, "A100-40GB-nodes": 190e12}
"""The rates of large matrix products in training."""

HALF_ELEMENTS = 6.6e6
"""The elements of a product with which forward reaches half of its limit, fitted to the runs on 4xH100-80GB."""

PHASE_NOISE, REST_NOISE = 0.05, 0.2
"""Standard deviations of the logarithms of measured forward and backward, and of the rest of an iteration."""


class PhaseSeconds(NamedTuple):
    """Seconds of forward and backward over all micro-batches, and of the rest, which is in no phase."""

    forward_s: float
    backward_s: float
    rest_s: float


def priors_of_phases(machine: str) -> dict[str, Prior]:
    """Return the priors of the rates that the phases depend on."""
    return {
        "training_flops_per_s": Prior(LIMIT_FLOPS_PER_S[machine], 0.25),
        "layer_s": Prior(LAYER_S, 0.3),
        # The forward after an interleaved update takes 6 to 11 ms per layer in the runs of at most 13B on 4xH100, whose
        # kernels are shorter than that, and stock's 4.5 to 4.7 ms. The logs do not show the reason.
        "interleaved_layer_s": Prior(0.007, 0.3),
        # 100 Gb/s per node of 4 GPUs.
        "inter_node_bytes_per_s": Prior(3e9, 0.7),
        # Gradients are copied to pageable memory while the host waits, or at the link's rate.
        "blocking_gradient_bytes_per_s": Prior(6e9, 0.7),
        "gradient_bytes_per_s": Prior(link_bytes_per_s(machine), 0.7),
        "rest_s": Prior(REST_S, 0.3),
        "interleaved_rest_s": Prior(0.48, 0.3),
    }


def phases_of(run: MeasuredRun, rates: Mapping[str, float]) -> PhaseSeconds:
    """Return the predicted phases of ``run``.

    The last backward copies the fp32 gradients of the offloaded sub-groups to host memory, after it has reduced them.
    """
    forward_s, backward_s = micro_batch_seconds(run, rates)
    interleaved = run.setting.update_stride is not None
    numel = updated_parameters(run.setting)
    copied_bytes = FP32_BYTES * (numel.on_cpu + numel.streamed)
    copies = rates["blocking_gradient_bytes_per_s" if run.blocking else "gradient_bytes_per_s"]
    first_forward_s = max(forward_s, run.setting.layers * rates["interleaved_layer_s"]) if interleaved else forward_s
    return PhaseSeconds(
        forward_s=first_forward_s + (run.accumulation - 1) * forward_s,
        backward_s=run.accumulation * backward_s + copied_bytes / copies,
        rest_s=rates["interleaved_rest_s" if interleaved else "rest_s"],
    )


def hiding_backward_s(run: MeasuredRun, rates: Mapping[str, float]) -> float:
    """Return the seconds of backward by the rules of ``plan``: it hides the copies of gradients as far as it lasts."""
    link = link_bytes_per_s(run.machine)
    plan = UpdatePlan(workload=workload_of(run.setting), placements=placements_of(run.setting), num_slots=1)
    path = GradientPath.for_stock(plan)
    _, computed_s = micro_batch_seconds(run, rates)
    earlier_s = max(computed_s, 2 * path.accumulated_bytes / link)
    return (run.accumulation - 1) * earlier_s + max(computed_s, (path.down_bytes + path.up_bytes) / link)


def micro_batch_seconds(run: MeasuredRun, rates: Mapping[str, float]) -> tuple[float, float]:
    """Return the predicted forward and backward of one micro-batch, without the copies of gradients."""
    setting, peers = run.setting, PRESETS[run.machine].peer_bytes_per_s
    tokens = run.micro_batch * SEQUENCE
    forward_flops = tokens * (2 * setting.real_params + 4 * SEQUENCE * setting.hidden * setting.layers)
    logits_flops = 2 * tokens * setting.hidden * VOCAB
    model_bytes = PARAM_BYTES * setting.real_params
    work = MicroBatch(
        layers=setting.layers,
        # The fitted seconds are per layer.
        modules=setting.layers,
        elements=tokens * setting.hidden,
        forward_flops=forward_flops,
        # Backward takes twice as long as forward, and the layers are recomputed.
        backward_flops=3 * forward_flops - logits_flops,
        ranks=setting.ranks,
        gathered_bytes=model_bytes,
        reduced_bytes=model_bytes,
    )
    phase_rates = PhaseRates(
        flops_per_s=rates["training_flops_per_s"] * work.elements / (work.elements + HALF_ELEMENTS),
        network=Network(
            ranks_per_node=GPUS_PER_NODE,
            all_gather_bytes_per_s=peers,
            reduce_scatter_bytes_per_s=peers,
            inter_node_bytes_per_s=rates["inter_node_bytes_per_s"],
        ),
        overheads=Overheads(forward_s=rates["layer_s"], backward_s=rates["layer_s"]),
    )
    return work.forward_s(phase_rates), work.backward_s(phase_rates)


def fit_phases(runs: Sequence[MeasuredRun], inter_node_bytes_per_s: float | None = None) -> FittedRates:
    """Return the rates that fit the phases of ``runs`` best. There must be at least one run, all of one machine.

    ``inter_node_bytes_per_s`` is fitted also, unless it is given.
    """
    priors, measured = priors_of_phases(runs[0].machine), []
    if inter_node_bytes_per_s is not None:
        priors["inter_node_bytes_per_s"] = Prior(inter_node_bytes_per_s, 1e-3)
    for run in runs:
        forward_s, backward_s, updated_s, iteration_s = run.measured_s.values()
        # The times of a log are rounded, and the rest must be positive for its logarithm.
        measured.append([forward_s, backward_s, max(0.02, iteration_s - forward_s - backward_s - updated_s)])
    noise = np.array([PHASE_NOISE, PHASE_NOISE, REST_NOISE])

    def residuals(rates: Mapping[str, float]) -> Vector:
        flat: Vector = (np.log(np.array([phases_of(run, rates) for run in runs]) / measured) / noise).ravel()
        return flat

    return fit_rates(residuals, priors)
