"""Estimate the layout and the speed that Megatron-LM's pipeline would have on the same cluster, as a comparison.

DeepSpeed runs no pipeline with ZeRO-3 (``deepspeed/runtime/pipe/engine.py``, line 77).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from perf_model.cluster.layouts import Cluster
from perf_model.cluster.pipeline import batch_s, bubble_share, micro_batches_in_flight
from perf_model.training_run.job import Job
from perf_model.training_run.micro_batch import PhaseRates
from perf_model.training_run.training_memory import PARAM_BYTES

GRADIENT_BYTES_PER_PARAM = 4
"""Bytes per gradient: Megatron-LM accumulates and reduces those of bf16 models in fp32."""

TRAINED_BYTES_PER_PARAM = GRADIENT_BYTES_PER_PARAM + 12
"""Bytes per trained parameter on the GPU besides the bf16 parameter: the gradient, and fp32 master, ``exp_avg`` and
``exp_avg_sq`` 12, without a distributed optimizer (Megatron-LM, ``docs/source/api-guide/dist_optimizer.md``)."""


@dataclass(frozen=True, kw_only=True)
class PipelineLayout:
    """A layout of Megatron-LM with its predicted iteration. ``bubble`` is the idle share of the compute time."""

    tensor_parallel: int
    stages: int
    data_parallel: int
    micro_batch: int
    micro_batches: int
    bubble: float
    iteration_s: float
    tokens_per_s: float


def best_pipeline_layout(
    cluster: Cluster,
    job: Job,
    rates: PhaseRates,
    gpu_bytes: int | None,
    sizes: Sequence[int] | None = None,
    micro_batches: Sequence[int] | None = None,
) -> PipelineLayout | None:
    """Return the fastest layout by the paper's takeaways (arXiv 2104.04473, sections 3.2 to 3.4), or None if none fits.

    ``job`` has everything but the layout. ``sizes`` are tensor-parallel sizes. If they or ``micro_batches`` are None,
    all that the cluster permits are tried. There are several stages only if the tensor-parallel size is the largest of
    those. Their number is the smallest with which the model and its activations fit into ``gpu_bytes``, with 1F1B. All
    states are on the GPU. Communication between stages is assumed to be hidden; the all-reduces of tensor parallelism
    and of the gradients are not. No time is counted for the update.
    """
    layouts = _layouts(
        cluster,
        replace(job, accumulation=1, offload_param=False),
        rates,
        gpu_bytes,
        sizes or cluster.tensor_parallel_sizes(),
        micro_batches or range(1, cluster.largest_micro_batch + 1),
    )
    return min(layouts, key=lambda layout: layout.iteration_s, default=None)


def _layouts(
    cluster: Cluster,
    job: Job,
    rates: PhaseRates,
    gpu_bytes: int | None,
    sizes: Sequence[int],
    micro_batches: Sequence[int],
) -> Iterator[PipelineLayout]:
    for tensor_parallel, micro_batch in product(sizes, micro_batches):
        if cluster.global_batch % micro_batch:
            continue
        laid_out = replace(job, micro_batch=micro_batch, tensor_parallel=tensor_parallel)
        most_stages = cluster.shape.layers if tensor_parallel == max(sizes) else 1
        for stages in range(1, most_stages + 1):
            data_parallel, rest = divmod(cluster.gpus, tensor_parallel * stages)
            if rest or cluster.shape.layers % stages or cluster.global_batch % (data_parallel * micro_batch):
                continue
            count = cluster.global_batch // (data_parallel * micro_batch)
            if gpu_bytes is not None and _gpu_bytes(laid_out, stages, count) > gpu_bytes:
                continue
            iteration_s = _iteration_s(laid_out, stages, data_parallel, rates, cluster.global_batch)
            yield PipelineLayout(
                tensor_parallel=tensor_parallel,
                stages=stages,
                data_parallel=data_parallel,
                micro_batch=micro_batch,
                micro_batches=count,
                bubble=bubble_share(stages, count),
                iteration_s=iteration_s,
                tokens_per_s=cluster.tokens / iteration_s,
            )
            break


def _gpu_bytes(job: Job, stages: int, micro_batches: int) -> float:
    """Return the peak GPU memory of the first stage: its states, and the activations of micro-batches in flight."""
    in_flight = micro_batches_in_flight(stages, micro_batches)
    states_bytes = (PARAM_BYTES + TRAINED_BYTES_PER_PARAM * job.trainable_share) * job.shard_numel / stages
    return job.memory.context_bytes + states_bytes + job.activation_bytes * in_flight / stages


def _iteration_s(job: Job, stages: int, data_parallel: int, rates: PhaseRates, global_batch: int) -> float:
    # The whole model is on the GPUs of the stages, so nothing is gathered.
    work = replace(job.work, gathered_bytes=0.0, reduced_bytes=0.0)

    def micro_batch_s(_: int) -> float:
        """Return the seconds of one stage."""
        return (work.forward_s(rates) + work.backward_s(rates)) / stages

    pipelined_s = batch_s(global_batch // data_parallel, job.micro_batch, stages, micro_batch_s)
    # Tensor-parallel ranks are on one node, and so are the stages that it has room for.
    on_node = max(1, job.ranks_on_node // (job.tensor_parallel * stages))
    among_data_parallel = replace(rates.network, ranks_per_node=on_node)
    gradients_bytes = GRADIENT_BYTES_PER_PARAM * job.trainable_share * job.shard_numel / stages
    # Without a distributed optimizer, the gradients are all-reduced.
    return (
        pipelined_s
        + among_data_parallel.reduce_scatter_s(gradients_bytes, data_parallel)
        + among_data_parallel.all_gather_s(gradients_bytes, data_parallel)
    )
