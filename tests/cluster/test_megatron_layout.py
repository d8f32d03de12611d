"""Test the layout that Megatron-LM's pipeline would have: its schedule, table 1 of its paper and properties."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perf_model.cluster.pipeline import (
    PipelineLayout,
    best_pipeline_layout,
    bubble_share,
    megatron_rates,
    micro_batches_in_flight,
)
from perf_model.prediction.memory import GPU_MARGIN_BYTES
from perf_model.prediction.network import Network
from perf_model.presets.machines import MACHINES, SELENE
from perf_model.training_run.micro_batch import PhaseRates
from tests.cluster.paper_tables import PROFILE, SEQUENCE, ThroughputRow, job_of, rates_of, table_1


def order_of(stage: int, stages: int, micro_batches: int, chunks: int) -> list[tuple[str, int, int]]:
    """Return the operations of a stage with their chunk and micro-batch, as Megatron-LM runs them."""
    count = chunks * micro_batches
    interleaved = 2 * (stages - stage - 1) + (chunks - 1) * stages
    warm_up = min(interleaved if chunks > 1 else stages - stage - 1, count)

    def operation(kind: str, index: int) -> tuple[str, int, int]:
        if chunks == 1:
            return kind, 0, index
        group, rest = divmod(index, stages * chunks)
        chunk = rest // stages
        return kind, chunk if kind == "forward" else chunks - 1 - chunk, group * stages + rest % stages

    order = [operation("forward", index) for index in range(warm_up)]
    for index in range(count):
        if warm_up + index < count:
            order.append(operation("forward", warm_up + index))
        order.append(operation("backward", index))
    return order


def simulated_pipeline(stages: int, micro_batches: int, chunks: int = 1) -> tuple[float, float]:
    """Return the end of a 1F1B pipeline in units of a forward, and the most micro-batches that are in flight.

    Backward takes two units. An operation starts when the same stage and the neighbour that it depends on are done.
    """
    ends: dict[tuple[str, int, int], int] = {}
    orders = [order_of(stage, stages, micro_batches, chunks) for stage in range(stages)]
    free, last = [0] * stages, stages * chunks - 1
    while any(orders):
        for stage in range(stages):
            while orders[stage]:
                kind, chunk, index = orders[stage][0]
                # Consecutive parts of the model are on consecutive stages.
                part = chunk * stages + stage
                neighbour = part - 1 if kind == "forward" else part + 1
                needed = (kind, neighbour, index)
                if 0 <= neighbour <= last and needed not in ends:
                    break
                start = max(free[stage], ends.get(needed, 0))
                free[stage] = ends[kind, part, index] = start + (1 if kind == "forward" else 2)
                orders[stage].pop(0)
    in_flight = most = 0
    for (kind, part, _), _ in sorted(ends.items(), key=lambda item: item[1]):
        if part % stages == 0:
            in_flight += 1 if kind == "forward" else -1
            most = max(most, in_flight)
    return max(ends.values()) / chunks, most / chunks


@given(st.integers(1, 8), st.integers(1, 24))
def test_the_bubble_and_the_micro_batches_in_flight_are_those_of_a_simulated_pipeline(
    stages: int, micro_batches: int
) -> None:
    end, in_flight = simulated_pipeline(stages, micro_batches)
    assert end == pytest.approx(3 * micro_batches * (1 + bubble_share(stages, micro_batches)))
    assert in_flight == micro_batches_in_flight(stages, micro_batches)


@given(st.integers(2, 6), st.integers(1, 6), st.integers(2, 5))
def test_the_interleaved_schedule_divides_the_bubble_by_its_chunks(stages: int, groups: int, chunks: int) -> None:
    micro_batches = groups * stages
    end, in_flight = simulated_pipeline(stages, micro_batches, chunks)
    assert end == pytest.approx(3 * micro_batches * (1 + bubble_share(stages, micro_batches, chunks)))
    assert in_flight == pytest.approx(micro_batches_in_flight(stages, micro_batches, chunks))


GPU_BYTES = MACHINES[SELENE].gpu_memory_bytes - GPU_MARGIN_BYTES


WITH_PIPELINE = [row for row in table_1() if row.pipeline_parallel > 1]


def best_layout(row: ThroughputRow, rates: PhaseRates, gpu_bytes: float, *sizes: list[int]) -> PipelineLayout | None:
    return best_pipeline_layout(job_of(row), row.batch, rates, gpu_bytes, *sizes)


RATES = rates_of(job_of(WITH_PIPELINE[0]))


FEWER_STAGES = {"310.1": 12, "529.6": 21}
"""The rows for which fewer stages fit than the paper uses, 16 and 35; it does not give the reason."""


@pytest.mark.parametrize("row", WITH_PIPELINE, ids=lambda row: f"{row.numel_billions} B")
def test_the_smallest_number_of_stages_that_fits_is_that_of_table_1(row: ThroughputRow) -> None:
    found = best_layout(row, RATES, GPU_BYTES)
    assert found is not None
    assert (found.tensor_parallel, found.micro_batch) == (row.tensor_parallel, 1)
    assert found.stages == FEWER_STAGES.get(row.numel_billions, row.pipeline_parallel)
    assert found.tensor_parallel * found.stages * found.data_parallel == row.gpus
    assert found.micro_batches * found.micro_batch * found.data_parallel == row.batch
    assert found.bubble == bubble_share(found.stages, found.micro_batches, found.chunks)


LARGER_SIZES = {"1.7": 2}
"""The row that is predicted to be 3 % faster with two tensor-parallel ranks than with the paper's one."""


@pytest.mark.parametrize("row", table_1()[:4], ids=lambda row: f"{row.numel_billions} B")
def test_models_without_a_pipeline_in_table_1_need_none(row: ThroughputRow) -> None:
    found = best_layout(row, RATES, GPU_BYTES)
    assert found is not None
    assert (found.stages, found.bubble) == (1, 0)
    assert found.tensor_parallel == LARGER_SIZES.get(row.numel_billions, row.tensor_parallel)


def test_a_layout_has_one_of_the_given_sizes_and_micro_batches() -> None:
    row = WITH_PIPELINE[0]
    free = best_layout(row, RATES, GPU_BYTES)
    limited = best_layout(row, RATES, GPU_BYTES, [2, 4], [2])
    assert free is not None
    assert limited is not None
    assert (free.tensor_parallel, free.micro_batch) == (8, 1)
    assert (limited.tensor_parallel, limited.micro_batch) == (4, 2)
    assert limited.stages > free.stages
    assert best_layout(row, RATES, GPU_BYTES, [1], [7]) is None, "nothing divides the batch"


@given(st.floats(1, 20), st.sampled_from(["all_gather_bytes_per_s", "inter_node_bytes_per_s"]))
@settings(max_examples=5)
def test_more_bandwidth_is_never_slower_for_a_pipeline(factor: float, name: str) -> None:
    row = WITH_PIPELINE[0]
    faster = replace(RATES, network=replace(RATES.network, **{name: factor * getattr(RATES.network, name)}))
    before, after = (best_layout(row, rates, GPU_BYTES) for rates in (RATES, faster))
    assert before is not None
    assert after is not None
    assert after.iteration_s <= before.iteration_s


def test_without_a_network_an_iteration_is_arithmetic_and_bubble() -> None:
    row, rates = WITH_PIPELINE[0], replace(RATES, network=Network(ranks_per_node=8))
    flops = rates.matrix.limit_flops_per_s
    found = best_layout(row, rates, GPU_BYTES)
    assert found is not None
    arithmetic_s = job_of(row).shape.iteration_flops(row.batch, SEQUENCE, recompute=True) / row.gpus / flops
    assert found.iteration_s == pytest.approx(arithmetic_s * (1 + found.bubble))


def test_a_model_that_no_pipeline_holds_has_no_layout() -> None:
    assert best_layout(WITH_PIPELINE[-1], RATES, 10 * 10**9) is None


def test_frozen_parameters_need_fewer_stages_and_the_scores_of_attention_more() -> None:
    row = WITH_PIPELINE[2]
    job = job_of(row)

    def found(**options: object) -> PipelineLayout:
        layout = best_pipeline_layout(replace(job, **options), row.batch, RATES, GPU_BYTES, [8], [1])
        assert layout is not None
        return layout

    whole = found()
    assert found(trainable_share=0.01).stages < whole.stages < found(attention="eager", recompute=False).stages
    for ignored in ({"accumulation": 4}, {"offload_param": True}):
        assert found(**ignored) == whole


def test_only_several_nodes_of_the_preset_without_a_changed_figure_are_compared_with_megatron() -> None:
    job = job_of(WITH_PIPELINE[0])
    assert megatron_rates(PROFILE, job) is not None
    assert megatron_rates(PROFILE, replace(job, world_size=8)) is None, "one node"
    assert megatron_rates(MACHINES["a100-pcie4"].profile(8), job) is None
    assert megatron_rates(replace(MACHINES[SELENE], network_bytes_per_s=25e9).profile(8), job) is None
