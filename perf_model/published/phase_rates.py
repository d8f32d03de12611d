"""Predict forward, backward and the rest of an iteration of published runs, and fit their rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from perf_model.prediction.network import Network
from perf_model.presets.machines import HALF_ELEMENTS
from perf_model.published.least_squares import FittedRates, Prior, Vector, fit_rates
from perf_model.published.placements import VOCAB, updated_parameters
from perf_model.published.runs import MeasuredRun, TrainedBatch
from perf_model.published.update_rates import link_bytes_per_s, machine_of
from perf_model.schedule.workload import FP32_BYTES
from perf_model.training_run.micro_batch import PUBLISHED_OVERHEADS, MatrixRate, MicroBatch, Overheads, PhaseRates
from perf_model.training_run.model import iteration_flops
from perf_model.training_run.training_memory import PARAM_BYTES

SEQUENCE = 2048
"""Tokens per sequence of all published runs."""

PHASE_NOISE, REST_NOISE = 0.05, 0.2
"""Standard deviations of the logarithms of measured forward and backward, and of the rest of an iteration."""


@dataclass(frozen=True, kw_only=True)
class PhaseSeconds:
    """Seconds of forward and backward over all micro-batches, and of the rest, which is in no phase."""

    forward_s: float
    backward_s: float
    rest_s: float

    def iteration_s(self, update_s: float) -> float:
        """Return the seconds of the iteration with an update of ``update_s``."""
        return self.forward_s + self.backward_s + update_s + self.rest_s


def priors_of_phases(machine: str) -> dict[str, Prior]:
    """Return the priors of the rates that the phases depend on."""
    return {
        "training_flops_per_s": Prior(machine_of(machine).matmul_flops, 0.25),
        "layer_s": Prior(PUBLISHED_OVERHEADS.layer_s, 0.3),
        # The forward after an interleaved update takes 6 to 11 ms per layer in the runs of at most 13B on 4xH100, whose
        # kernels are shorter than that, and that of stock 4.5 to 4.7 ms. The logs do not show the reason.
        "interleaved_layer_s": Prior(0.007, 0.3),
        # 100 Gb/s per node of 4 GPUs.
        "inter_node_bytes_per_s": Prior(3e9, 0.7),
        # Gradients are copied to pageable memory while the host waits, or at the link's rate.
        "blocking_gradient_bytes_per_s": Prior(6e9, 0.7),
        "gradient_bytes_per_s": Prior(link_bytes_per_s(machine), 0.7),
        "rest_s": Prior(PUBLISHED_OVERHEADS.iteration_s, 0.3),
        "interleaved_rest_s": Prior(0.48, 0.3),
    }


def phases_of(run: MeasuredRun, batch: TrainedBatch, rates: Mapping[str, float]) -> PhaseSeconds:
    """Return the predicted phases of ``run`` with ``batch``.

    The last backward copies the fp32 gradients of the offloaded sub-groups to host memory, after it has reduced them.
    """
    forward_s, backward_s = micro_batch_seconds(run, batch, rates)
    interleaved = run.setting.update_stride is not None
    numel = updated_parameters(run.setting)
    copied_bytes = FP32_BYTES * (numel.on_cpu + numel.streamed)
    copies = rates["blocking_gradient_bytes_per_s" if batch.blocking else "gradient_bytes_per_s"]
    first_forward_s = max(forward_s, batch.layers * rates["interleaved_layer_s"]) if interleaved else forward_s
    return PhaseSeconds(
        forward_s=first_forward_s + (batch.accumulation - 1) * forward_s,
        backward_s=batch.accumulation * backward_s + copied_bytes / copies,
        rest_s=rates["interleaved_rest_s" if interleaved else "rest_s"],
    )


def micro_batch_seconds(run: MeasuredRun, batch: TrainedBatch, rates: Mapping[str, float]) -> tuple[float, float]:
    """Return the predicted forward and backward of one micro-batch, without the copies of gradients."""
    work, peers = _micro_batch(run, batch), machine_of(run.machine).peer_bytes_per_s
    phase_rates = PhaseRates(
        matrix=MatrixRate(limit_flops_per_s=rates["training_flops_per_s"], half_elements=HALF_ELEMENTS),
        network=Network(
            ranks_per_node=run.gpus_per_node,
            all_gather_bytes_per_s=peers,
            reduce_scatter_bytes_per_s=peers,
            inter_node_bytes_per_s=rates["inter_node_bytes_per_s"],
        ),
        overheads=Overheads(layer_s=rates["layer_s"]),
    )
    return work.forward_s(phase_rates), work.backward_s(phase_rates)


def fit_phases(runs: Sequence[MeasuredRun]) -> FittedRates | None:
    """Return the rates that fit the phases of ``runs`` best, or None if no run has all of its phases."""
    known, log_measured = [], []
    for run in runs:
        if run.batch is None or run.forward_s is None or run.backward_s is None or run.iteration_s is None:
            continue
        known.append((run, run.batch))
        rest_s = max(0.02, run.iteration_s - run.forward_s - run.backward_s - run.measured_s)
        log_measured.append(np.log([run.forward_s, run.backward_s, rest_s]))
    if not known:
        return None
    # A file may have thousands of runs with few settings.
    keys = [(run.setting, run.tp, run.dp, batch) for run, batch in known]
    distinct = dict(zip(keys, known, strict=True))
    noise = np.array([PHASE_NOISE, PHASE_NOISE, REST_NOISE])

    def residuals(rates: Mapping[str, float]) -> Vector:
        phases = {key: phases_of(run, batch, rates) for key, (run, batch) in distinct.items()}
        found = [phases[key] for key in keys]
        predicted = np.log([[each.forward_s, each.backward_s, each.rest_s] for each in found])
        flat: Vector = ((predicted - np.stack(log_measured)) / noise).ravel()
        return flat

    return fit_rates(residuals, priors_of_phases(known[0][0].machine))


def _micro_batch(run: MeasuredRun, batch: TrainedBatch) -> MicroBatch:
    """Return the work of one rank; every rank of a tensor-parallel group has an equal part of each product."""
    tokens, hidden = batch.micro_batch * SEQUENCE, run.setting.hidden
    forward_flops = tokens * (2 * run.setting.real_params + 4 * SEQUENCE * hidden * batch.layers)
    logits_flops = min(forward_flops, 2 * tokens * hidden * VOCAB)
    return MicroBatch.from_model(
        layers=batch.layers,
        hidden=hidden,
        tokens=tokens,
        forward_flops=forward_flops,
        backward_flops=iteration_flops(forward_flops, logits_flops, recompute=True) - forward_flops,
        shard_bytes=PARAM_BYTES * run.setting.real_params / run.tp,
        ranks=run.dp,
        tensor_parallel=run.tp,
    )
