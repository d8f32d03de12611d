"""Test the layout that Megatron-LM's pipeline would have, against table 1 of its paper and by properties."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perf_model.cluster.pipeline import PipelineLayout, best_pipeline_layout, bubble_share
from perf_model.prediction.network import Network
from perf_model.training_run.decoder import gpt
from perf_model.training_run.job import Job
from perf_model.training_run.micro_batch import MatrixRate, PhaseRates
from tests.cluster.paper_tables import PEAK_TFLOPS, SEQUENCE, VOCAB, ThroughputRow, table_1

A100_BYTES = 80 * 10**9
NETWORK = Network(
    ranks_per_node=8, all_gather_bytes_per_s=240e9, reduce_scatter_bytes_per_s=240e9, inter_node_bytes_per_s=25e9
)
"""Eight GPUs with 200 Gb/s each to other nodes (section 5), and an assumed 240 GB/s of NVLink."""

DGX_A100 = PhaseRates(matrix=MatrixRate(limit_flops_per_s=0.6e12 * PEAK_TFLOPS), network=NETWORK)
"""The rates of matrix products are assumed, too."""

WITH_PIPELINE = [row for row in table_1() if row.pipeline_parallel > 1]


def job_of(row: ThroughputRow) -> Job:
    shape = gpt("GPT", row.layers, row.hidden, row.heads, VOCAB, SEQUENCE)
    return Job(shape=shape, world_size=row.gpus, ranks_per_node=8, micro_batch=1, sequence=SEQUENCE)


def best_layout(row: ThroughputRow, rates: PhaseRates, gpu_bytes: int, *sizes: list[int]) -> PipelineLayout | None:
    return best_pipeline_layout(job_of(row), row.batch, rates, gpu_bytes, *sizes)


FEWER_STAGES = {"310.1": 12, "529.6": 21}
"""The rows for which fewer stages fit than the paper uses, 16 and 35; it does not give the reason."""


@pytest.mark.parametrize("row", WITH_PIPELINE, ids=lambda row: f"{row.numel_billions} B")
def test_the_smallest_number_of_stages_that_fits_is_that_of_table_1(row: ThroughputRow) -> None:
    found = best_layout(row, DGX_A100, A100_BYTES)
    assert found is not None
    assert (found.tensor_parallel, found.micro_batch) == (row.tensor_parallel, 1)
    assert found.stages == FEWER_STAGES.get(row.numel_billions, row.pipeline_parallel)
    assert found.tensor_parallel * found.stages * found.data_parallel == row.gpus
    assert found.micro_batches * found.micro_batch * found.data_parallel == row.batch
    assert found.bubble == bubble_share(found.stages, found.micro_batches)
    assert found.tokens_per_s == pytest.approx(row.batch * SEQUENCE / found.iteration_s)


@pytest.mark.parametrize("row", table_1()[:4], ids=lambda row: f"{row.numel_billions} B")
def test_models_without_a_pipeline_in_table_1_need_none_and_no_larger_tensor_parallel_size(row: ThroughputRow) -> None:
    found = best_layout(row, DGX_A100, A100_BYTES)
    assert found is not None
    assert (found.stages, found.bubble) == (1, 0)
    assert found.tensor_parallel <= row.tensor_parallel


def test_a_layout_has_one_of_the_given_sizes_and_micro_batches() -> None:
    row = WITH_PIPELINE[0]
    free = best_layout(row, DGX_A100, A100_BYTES)
    limited = best_layout(row, DGX_A100, A100_BYTES, [2, 4], [2])
    assert free is not None
    assert limited is not None
    assert (free.tensor_parallel, free.micro_batch) == (8, 1)
    assert (limited.tensor_parallel, limited.micro_batch) == (4, 2)
    assert limited.stages > free.stages
    assert best_layout(row, DGX_A100, A100_BYTES, [1], [7]) is None, "nothing divides the batch"


@given(st.floats(1, 20), st.sampled_from(["all_gather_bytes_per_s", "inter_node_bytes_per_s"]))
@settings(max_examples=5)
def test_more_bandwidth_is_never_slower_for_a_pipeline(factor: float, name: str) -> None:
    row = WITH_PIPELINE[0]
    faster = replace(DGX_A100, network=replace(NETWORK, **{name: factor * getattr(NETWORK, name)}))
    before, after = (best_layout(row, rates, A100_BYTES) for rates in (DGX_A100, faster))
    assert before is not None
    assert after is not None
    assert after.iteration_s <= before.iteration_s


def test_without_a_network_an_iteration_is_arithmetic_and_bubble() -> None:
    row, rates = WITH_PIPELINE[0], replace(DGX_A100, network=Network(ranks_per_node=8))
    flops = rates.matrix.limit_flops_per_s
    found = best_layout(row, rates, A100_BYTES)
    assert found is not None
    arithmetic_s = job_of(row).shape.iteration_flops(row.batch, SEQUENCE, recompute=True) / row.gpus / flops
    assert found.iteration_s == pytest.approx(arithmetic_s * (1 + found.bubble))


def test_a_model_that_no_pipeline_holds_has_no_layout() -> None:
    assert best_layout(WITH_PIPELINE[-1], DGX_A100, 10 * 10**9) is None


def test_frozen_parameters_need_fewer_stages_and_the_scores_of_attention_more() -> None:
    row = WITH_PIPELINE[2]
    job = job_of(row)

    def found(**options: object) -> PipelineLayout:
        layout = best_pipeline_layout(replace(job, **options), row.batch, DGX_A100, A100_BYTES, [8], [1])
        assert layout is not None
        return layout

    whole = found()
    assert found(trainable_share=0.01).stages < whole.stages < found(attention="eager", recompute=False).stages
    for ignored in ({"accumulation": 4}, {"offload_param": True}):
        assert found(**ignored) == whole
