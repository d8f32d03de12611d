"""Test the volumes of communication and the memory of checkpoints by hand and by counting messages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perf_model.cluster.pipeline import bubble_share, micro_batches_in_flight
from tests.cluster.paper_formulas import (
    activation_bytes,
    best_number_of_checkpoints,
    gradient_all_reduce_elements,
    pipeline_elements,
    scattered_pipeline_elements,
    tensor_parallel_elements,
    zero3_elements,
)

SIZES = st.integers(1, 64)


def sent_by_ring_all_reduce(elements: float, ranks: int) -> float:
    """Count the elements that a rank sends: one part per step, in the steps of the reduction and of the gather."""
    part, steps = elements / ranks, 2 * (ranks - 1)
    return part * steps


@given(SIZES, SIZES, SIZES, st.integers(1, 16))
def test_tensor_parallelism_sends_four_all_reduces_per_layer(
    micro_batch: int, sequence: int, hidden: int, tensor_parallel: int
) -> None:
    activations = micro_batch * sequence * hidden
    counted = 4 * sent_by_ring_all_reduce(activations, tensor_parallel)
    assert tensor_parallel_elements(micro_batch, sequence, hidden, tensor_parallel) == pytest.approx(counted)
    assert pipeline_elements(micro_batch, sequence, hidden) == activations
    scattered = scattered_pipeline_elements(micro_batch, sequence, hidden, tensor_parallel)
    assert scattered * tensor_parallel == pytest.approx(activations)


@given(st.integers(1, 10**12), st.integers(1, 4096))
def test_zero3_sends_one_and_a_half_times_as_much_as_an_all_reduce(numel: int, ranks: int) -> None:
    counted = sent_by_ring_all_reduce(numel, ranks)
    assert gradient_all_reduce_elements(numel, ranks) == pytest.approx(counted)
    assert zero3_elements(numel, ranks) == pytest.approx(1.5 * counted)


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


@given(st.integers(1, 200), st.floats(1, 1e6), st.floats(1, 1e6), st.floats(0.1, 10))
def test_no_other_number_of_checkpoints_takes_less_memory(
    layers: int, input_bytes: float, intermediate_bytes: float, factor: float
) -> None:
    best = best_number_of_checkpoints(layers, input_bytes, intermediate_bytes)
    sizes = (input_bytes, intermediate_bytes)
    least = activation_bytes(layers, best, *sizes)
    assert least <= activation_bytes(layers, factor * best, *sizes) * (1 + 1e-9)
