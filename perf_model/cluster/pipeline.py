"""Estimate the layout and the speed of Megatron-LM's pipeline on the same cluster, for comparison.

DeepSpeed runs no pipeline with ZeRO-3 (``deepspeed/runtime/pipe/engine.py``). Sections are of arXiv 2104.04473.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from perf_model.cluster.layouts import MICRO_BATCHES, tensor_parallel_sizes
from perf_model.training_run.job import Job
from perf_model.training_run.micro_batch import PARAM_BYTES, PhaseRates
from perf_model.training_run.training_memory import TrainingMemory

GRADIENT_BYTES_PER_PARAM = 4
"""Megatron-LM accumulates and reduces the gradients of bf16 models in fp32."""

TRAINED_BYTES_PER_PARAM = GRADIENT_BYTES_PER_PARAM + 12
"""Bytes per trained parameter of the gradient and of fp32 master, ``exp_avg`` and ``exp_avg_sq``, without a distributed
optimizer (Megatron-LM, ``docs/source/api-guide/dist_optimizer.md``)."""


class PipelineLayout(NamedTuple):
    """A layout of Megatron-LM with its predicted iteration. ``bubble`` is the idle share of the compute time."""

    tensor_parallel: int
    stages: int
    data_parallel: int
    micro_batch: int
    micro_batches: int
    bubble: float
    iteration_s: float
    tokens_per_s: float


def bubble_share(stages: int, micro_batches: int) -> float:
    """Return the idle time of a stage as a share of its compute time (section 2.2.1)."""
    return (stages - 1) / micro_batches


def micro_batches_in_flight(stages: int, micro_batches: int) -> int:
    """Return the most micro-batches whose activations the first stage keeps with 1F1B (section 2.2.1)."""
    return min(stages, micro_batches)


def best_pipeline_layout(
    job: Job,
    global_batch: int,
    rates: PhaseRates,
    gpu_bytes: int | None,
    sizes: Sequence[int] | None = None,
    micro_batches: Sequence[int] | None = None,
) -> PipelineLayout | None:
    """Return the fastest layout by the paper's takeaways (sections 3.2 to 3.4), or None if none fits.

    The tensor-parallel ``sizes`` and ``micro_batches`` default to all possible ones. Only the largest size is combined
    with several stages: as few as fit into ``gpu_bytes`` with 1F1B. All states are on the GPU, and the update takes no
    time. Communication between stages is hidden. All-reduces are exposed.
    """
    found, sizes = [], sizes or tensor_parallel_sizes(job)
    for tensor_parallel, micro_batch in product(sizes, micro_batches or MICRO_BATCHES):
        laid_out = replace(job, micro_batch=micro_batch, tensor_parallel=tensor_parallel)
        laid_out = replace(laid_out, accumulation=1, offload_param=False)
        for stages in range(1, job.shape.layers + 1 if tensor_parallel == max(sizes) else 2):
            data_parallel, rest = divmod(job.world_size, tensor_parallel * stages)
            if rest or job.shape.layers % stages or global_batch % (data_parallel * micro_batch):
                continue
            count = global_batch // (data_parallel * micro_batch)
            if gpu_bytes is None or _gpu_bytes(laid_out, stages, count) <= gpu_bytes:
                iteration_s = _iteration_s(laid_out, stages, data_parallel, rates, count)
                speed = bubble_share(stages, count), iteration_s, global_batch * job.sequence / iteration_s
                found.append(PipelineLayout(tensor_parallel, stages, data_parallel, micro_batch, count, *speed))
                break
    return min(found, key=lambda layout: layout.iteration_s, default=None)


def _gpu_bytes(job: Job, stages: int, micro_batches: int) -> float:
    memory, in_flight = TrainingMemory(job), micro_batches_in_flight(stages, micro_batches)
    states_bytes = (PARAM_BYTES + TRAINED_BYTES_PER_PARAM * job.trainable_share) * job.shard_numel / stages
    return memory.context_bytes + states_bytes + memory.activation_bytes * in_flight / stages


def _iteration_s(job: Job, stages: int, data_parallel: int, rates: PhaseRates, micro_batches: int) -> float:
    """Return the seconds of the micro-batches (section 3.4, equation 1) and of the all-reduce of the gradients."""
    # The whole model is on the GPUs of the stages, so nothing is gathered.
    work = replace(job.work, gathered_bytes=0.0, reduced_bytes=0.0)
    stage_s = (work.forward_s(rates) + work.backward_s(rates)) / stages
    on_node = max(1, job.ranks_on_node // (job.tensor_parallel * stages))
    network = replace(rates.network, ranks_per_node=on_node)
    gradients_bytes = GRADIENT_BYTES_PER_PARAM * job.trainable_share * job.shard_numel / stages
    reduce_s = network.reduce_scatter_s(gradients_bytes, data_parallel)
    return (micro_batches + stages - 1) * stage_s + reduce_s + network.all_gather_s(gradients_bytes, data_parallel)
