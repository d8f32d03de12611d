"""Test the layouts of a cluster: which ones there are, and which batches are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perf_model.cluster.layouts import Layout, layouts_of, tensor_parallel_sizes
from perf_model.prediction.network import Network
from perf_model.presets.models import MODELS
from perf_model.training_run.job import Job
from perf_model.training_run.micro_batch import MatrixRate, PhaseRates
from perf_model.training_run.model import ModelError
from perf_model.training_run.training_memory import TrainingMemory
from tests.cluster.paper_formulas import tensor_parallel_elements, zero3_elements

CLUSTER = Job(shape=MODELS["Llama-3-8B"], world_size=64, ranks_per_node=8, micro_batch=1, sequence=4096)


@given(
    st.integers(1, 8),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 64),
    st.sampled_from([None, [1, 2, 4], [3], [5, 1]]),
)
def test_every_layout_trains_the_global_batch_on_all_gpus(
    nodes: int, ranks_per_node: int, sequences: int, micro_batches: list[int] | None
) -> None:
    gpus = nodes * ranks_per_node
    cluster = replace(CLUSTER, world_size=gpus, ranks_per_node=ranks_per_node)
    sizes = tensor_parallel_sizes(cluster)
    assert sizes == [size for size in (1, 2, 4, 8) if size <= ranks_per_node]
    try:
        layouts = layouts_of(cluster, gpus * sequences, sizes, micro_batches)
    except ModelError:
        assert micro_batches == [3]
        assert all(gpus * sequences * size // gpus % 3 for size in sizes)
        return
    assert len(set(layouts)) == len(layouts)
    for layout in layouts:
        assert layout.tensor_parallel * layout.data_parallel == gpus
        assert layout.data_parallel * layout.micro_batch * layout.accumulation == gpus * sequences
        assert layout.micro_batch in (micro_batches or range(1, 65))


def test_all_micro_batches_that_divide_the_batch_of_a_rank_are_tried() -> None:
    layouts = layouts_of(CLUSTER, 64 * 12, [1])
    assert [(layout.micro_batch, layout.accumulation) for layout in layouts] == [
        (1, 12),
        (2, 6),
        (3, 4),
        (4, 3),
        (6, 2),
        (12, 1),
    ]


def test_sizes_that_the_batch_does_not_allow_are_left_out() -> None:
    layouts = layouts_of(CLUSTER, 16, [1, 2, 4, 8])
    assert layouts[0] == Layout(tensor_parallel=4, data_parallel=16, micro_batch=1, accumulation=1)
    assert {layout.tensor_parallel for layout in layouts} == {4, 8}


@pytest.mark.parametrize(
    ("global_batch", "sizes", "micro_batches", "message"),
    [
        (100, [1, 2, 4], None, "the data-parallel size, here of 16, found 100.*96 or 112"),
        (5, [1], None, "data-parallel size, here of 64, found 5.*Give --global-batch 64, or"),
        (64, [1], [3], "data-parallel size times the micro-batch, here of 192.*found 64.*Give --global-batch 192, or"),
    ],
)
def test_a_batch_that_no_layout_divides_is_refused_with_the_batches_that_one_divides(
    global_batch: int, sizes: list[int], micro_batches: list[int] | None, message: str
) -> None:
    with pytest.raises(ModelError, match=f"(?s)global_batch: must be a multiple of .*{message}") as caught:
        layouts_of(CLUSTER, global_batch, sizes, micro_batches)
    assert len(str(caught.value).splitlines()) == 2
    *_, remedy = str(caught.value).splitlines()
    for batch in (int(word.strip(",")) for word in remedy.split() if word.strip(",").isdigit()):
        assert layouts_of(CLUSTER, batch, sizes, micro_batches)


def test_a_tensor_parallel_size_that_a_node_does_not_divide_by_is_refused() -> None:
    with pytest.raises(ModelError, match=r"tensor_parallel: must divide the number of ranks of a node, 8, found 3"):
        layouts_of(CLUSTER, 1024, [3])


@pytest.mark.parametrize("value", [0, 10**20, True])
def test_impossible_batches_are_refused(value: int) -> None:
    with pytest.raises(ModelError, match=r"global_batch: must be an integer from 1 to .*\nCorrect --global-batch"):
        layouts_of(CLUSTER, value, [1])


# The job of one layout

TENSOR_PARALLEL = Job(
    shape=MODELS["Llama-3-8B"], world_size=16, ranks_per_node=8, micro_batch=2, sequence=512, tensor_parallel=4
)


def test_tensor_parallel_ranks_divide_matrices_operations_and_activations() -> None:
    whole = replace(TENSOR_PARALLEL, tensor_parallel=1)
    shape = whole.shape
    norms = (2 * shape.layers + 1) * shape.hidden
    assert TENSOR_PARALLEL.shard_numel == (shape.numel - norms) // 4 + norms
    assert TENSOR_PARALLEL.data_parallel == 4
    assert TENSOR_PARALLEL.tokens == whole.tokens / 4
    assert TENSOR_PARALLEL.work.forward_flops / 1e12 == whole.work.forward_flops / 1e12 / 4
    assert TENSOR_PARALLEL.work.backward_flops / 1e12 == pytest.approx(whole.work.backward_flops / 1e12 / 4)
    assert TENSOR_PARALLEL.mfu(1.0, 1e15) == pytest.approx(whole.mfu(1.0, 1e15) / 4)
    layer_bytes, divided_bytes = (TrainingMemory(job).layer_bytes for job in (whole, TENSOR_PARALLEL))
    norms_bytes = 2 * 8 * 2 * 512 * shape.hidden
    assert divided_bytes - norms_bytes == (layer_bytes - norms_bytes) / 4, "all but the inputs of the norms is divided"
    units = TENSOR_PARALLEL.workload(10**9)
    assert units.numel == pytest.approx(TENSOR_PARALLEL.shard_numel / 4, rel=1e-4)


@pytest.mark.parametrize("recompute", [False, True])
def test_tensor_parallel_ranks_communicate_as_the_paper_counts_and_nothing_hides_it(recompute: bool) -> None:
    job = replace(TENSOR_PARALLEL, recompute=recompute)
    rate, slow = 1e9, Network(ranks_per_node=8)
    rates = PhaseRates(matrix=MatrixRate(limit_flops_per_s=1e12), network=slow)
    slow = replace(slow, all_gather_bytes_per_s=rate, reduce_scatter_bytes_per_s=rate)
    # Without gathers and reductions of ZeRO-3, which matrix products would hide.
    work = replace(job.work, gathered_bytes=0.0, reduced_bytes=0.0)
    added_s = sum(phase(replace(rates, network=slow)) - phase(rates) for phase in (work.forward_s, work.backward_s))
    sent_bytes = 2 * tensor_parallel_elements(job.micro_batch, job.sequence, job.shape.hidden, 4) * job.shape.layers
    assert added_s == pytest.approx((1.5 if recompute else 1) * sent_bytes / rate)


def test_ranks_that_partition_the_same_parameters_gather_a_shard_over_their_share_of_the_network() -> None:
    rate = 1e6
    rates = PhaseRates(
        matrix=MatrixRate(limit_flops_per_s=1e30), network=Network(ranks_per_node=8, inter_node_bytes_per_s=rate)
    )
    work = TENSOR_PARALLEL.work
    # Two of the four data-parallel ranks are on each of two nodes, and send over two of its eight connections.
    sent_bytes = 2 * zero3_elements(TENSOR_PARALLEL.shard_numel, 4)
    assert work.forward_s(rates) + work.backward_s(rates) == pytest.approx(sent_bytes / (2 * rate))


@pytest.mark.parametrize(("size", "what"), [(16, "ranks of a node, 8"), (3, "ranks of a node, 8")])
def test_a_job_with_an_impossible_tensor_parallel_size_is_refused(size: int, what: str) -> None:
    with pytest.raises(ModelError, match=f"tensor_parallel: must divide the number of {what}, found {size}"):
        replace(TENSOR_PARALLEL, tensor_parallel=size)


def test_a_model_with_fewer_key_value_heads_than_ranks_is_refused() -> None:
    job = replace(TENSOR_PARALLEL, shape=MODELS["Qwen2.5-7B"])
    with pytest.raises(ModelError, match=r"tensor_parallel: must divide the number of key-value heads, 4, found 8"):
        replace(job, tensor_parallel=8)
