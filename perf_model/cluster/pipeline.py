"""Predict Megatron-LM's pipeline on the machine of its paper (arXiv 2104.04473), for comparison with ZeRO-3.

DeepSpeed runs no pipeline with ZeRO-3 (``deepspeed/runtime/pipe/engine.py``). Sections and tables are of the paper.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import NamedTuple

from perf_model.cluster.layouts import MICRO_BATCHES, tensor_parallel_sizes
from perf_model.prediction.hardware import HardwareProfile
from perf_model.presets.machines import MACHINES, SELENE
from perf_model.training_run.job import Job
from perf_model.training_run.micro_batch import NO_OVERHEADS, PARAM_BYTES, PhaseRates
from perf_model.training_run.training_memory import TrainingMemory

ADAPTER_BYTES_PER_S = 25e9
"""The rate of the adapter of each GPU, 200 Gb/s (section 5). ZeRO-3 reaches the lower rate of the preset (table 2)."""

GRADIENT_BYTES, STATE_BYTES = 4, 12
"""Bytes per trained parameter of the gradient, which Megatron-LM accumulates and reduces in fp32, and of fp32 master,
``exp_avg`` and ``exp_avg_sq`` without a distributed optimizer (``docs/source/api-guide/dist_optimizer.md``)."""


class PipelineLayout(NamedTuple):
    """A layout in which each GPU runs ``chunks`` parts of the model, and idles ``bubble`` times its compute time."""

    tensor_parallel: int
    stages: int
    chunks: int
    data_parallel: int
    micro_batch: int
    micro_batches: int
    bubble: float
    iteration_s: float


def megatron_rates(profile: HardwareProfile, job: Job) -> PhaseRates | None:
    """Return the rates of Megatron-LM, or None unless the job is on several nodes, of 8 GPUs, of the paper's machine.

    Only there do tables 1 and 2 calibrate both sides of the comparison, with all parameters trained and used by every
    token. A changed figure makes another machine.
    """
    is_dense = job.shape.active_numel == job.shape.numel and job.trainable_share == 1
    if not is_dense or job.ranks_on_node != 8 or job.world_size == job.ranks_on_node:
        return None
    if profile != MACHINES[SELENE].profile(job.ranks_on_node):
        return None
    rates = PhaseRates.from_profile(profile, job.ranks_on_node, NO_OVERHEADS)
    return replace(rates, network=replace(rates.network, inter_node_bytes_per_s=ADAPTER_BYTES_PER_S))


def bubble_share(stages: int, micro_batches: int, chunks: int = 1) -> float:
    """Return the idle time of a stage as a share of its compute time (sections 2.2.1 and 2.2.2)."""
    return (stages - 1) / (chunks * micro_batches)


def micro_batches_in_flight(stages: int, micro_batches: int, chunks: int = 1) -> float:
    """Return the most micro-batches whose activations the first stage keeps with 1F1B.

    With several chunks, it starts ``2 * (stages - 1) + (chunks - 1) * stages + 1`` chunks of micro-batches before it
    waits for the first backward (Megatron-LM, ``forward_backward_pipelining_with_interleaving``).
    """
    return min(stages + (stages - 1) / chunks if chunks > 1 else stages, micro_batches)


def best_pipeline_layout(job: Job, global_batch: int, rates: PhaseRates, gpu_bytes: float) -> PipelineLayout | None:
    """Return the fastest layout by the paper's takeaways (sections 3.2 to 3.4), or None if none fits."""
    found: list[PipelineLayout] = []
    sizes, layers = tensor_parallel_sizes(job), job.shape.layers
    for size, micro_batch in product(sizes, MICRO_BATCHES):
        laid_out = replace(job, tensor_parallel=size, micro_batch=micro_batch, accumulation=1, offload_param=False)
        # Only the largest tensor-parallel size is combined with several stages, as few as fit into ``gpu_bytes``.
        for stages in range(1, layers + 1 if size == max(sizes) else 2):
            chunks = range(1, layers // stages + 1)
            layouts = [pipeline_layout(laid_out, global_batch, rates, gpu_bytes, stages, each) for each in chunks]
            if fitting := [layout for layout in layouts if layout is not None]:
                found += fitting
                break
    return min(found, key=lambda layout: layout.iteration_s, default=None)


def pipeline_layout(
    job: Job, global_batch: int, rates: PhaseRates, gpu_bytes: float, stages: int, chunks: int
) -> PipelineLayout | None:
    """Return the layout, or None if it does not fit or divides the GPUs, the layers or the batch unevenly.

    ``job`` contains the tensor-parallel size and the micro-batch. All states are on the GPU, and the update takes no
    time. All-reduces and copies between stages are exposed.
    """
    data_parallel, rest = divmod(job.world_size, job.tensor_parallel * stages)
    if rest or job.shape.layers % (stages * chunks) or global_batch % (data_parallel * job.micro_batch):
        return None
    count, memory = global_batch // (data_parallel * job.micro_batch), TrainingMemory(job)
    if chunks > 1 and (stages == 1 or count % stages):
        return None
    numel, trained_numel = job.shard_numel / stages, job.trainable_share * job.shard_numel / stages
    states_bytes = PARAM_BYTES * numel + (GRADIENT_BYTES + STATE_BYTES) * trained_numel
    in_flight_bytes = memory.activation_bytes * micro_batches_in_flight(stages, count, chunks) / stages
    if memory.context_bytes + states_bytes + in_flight_bytes > gpu_bytes:
        return None
    # Each rank reduces its gradients with its own adapter.
    network, gradient_bytes = replace(rates.network, ranks_per_node=1), GRADIENT_BYTES * trained_numel
    reduce_s = network.reduce_scatter_s(gradient_bytes, data_parallel)
    reduce_s += network.all_gather_s(gradient_bytes, data_parallel)
    bubble = bubble_share(stages, count, chunks)
    iteration_s = count * (1 + bubble) * _stage_s(job, stages, chunks, rates) + reduce_s
    sizes = (job.tensor_parallel, stages, chunks, data_parallel, job.micro_batch, count)
    return PipelineLayout(*sizes, bubble, iteration_s)


def _stage_s(job: Job, stages: int, chunks: int, rates: PhaseRates) -> float:
    """Return the seconds of a micro-batch in one stage (section 3.4, equation 1), with its copies to the next one."""
    # The whole model is on the GPUs of the stages, so nothing is gathered.
    work, ranks = replace(job.work, gathered_bytes=0.0, reduced_bytes=0.0), job.tensor_parallel
    # Each rank sends a part to the next node, whose ranks gather the parts (section 4.1), in forward and in backward.
    sent_bytes = PARAM_BYTES * work.elements if stages > 1 else 0.0
    sent_s = sent_bytes / ranks / rates.network.inter_node_bytes_per_s + rates.network.all_gather_s(sent_bytes, ranks)
    return (work.forward_s(rates) + work.backward_s(rates)) / stages + 2 * chunks * sent_s
