"""Reproduce the tables and figures of the Megatron paper (arXiv 2104.04473) with formulas and with ``ModelShape``."""

from __future__ import annotations

from fractions import Fraction

import pytest

from perf_model.cluster.pipeline import bubble_share
from perf_model.prediction.network import Network
from perf_model.training_run.decoder import gpt
from perf_model.training_run.job import Job
from perf_model.training_run.micro_batch import MatrixRate, PhaseRates
from tests.cluster.paper_formulas import (
    approximate_training_s,
    batch_s,
    best_micro_batch,
    bubble_share_beside_data_parallel,
    scaled_throughput,
    training_s,
    zero3_elements,
)
from tests.cluster.paper_tables import PEAK_TFLOPS, SEQUENCE, VOCAB, ThroughputRow, table_1, table_2

DAY_S = 86_400
TOKENS = 300e9
"""The tokens that the training times of table 2 are for."""

TABLE_1 = table_1()
ZERO_3, PTD = table_2("zero3"), table_2("ptd")
MODELS_OF_TABLE_2 = ("174.6", "529.6")


def name_of(row: ThroughputRow) -> str:
    return f"{row.scheme} {row.numel_billions} B on {row.gpus}"


def test_the_tables_are_complete() -> None:
    assert (len(TABLE_1), len(ZERO_3), len(PTD)) == (10, 6, 6)


@pytest.mark.parametrize("row", TABLE_1, ids=name_of)
def test_table_1_is_reproduced(row: ThroughputRow) -> None:
    assert f"{row.numel / 1e9:.1f}" == row.numel_billions, "equation 2, to the printed digit"
    assert round(100 * row.tflops / PEAK_TFLOPS) == row.peak_percent
    assert row.gpus * row.tflops / 1e3 == pytest.approx(row.aggregate_pflops, rel=5e-3)
    assert row.gpus % (row.tensor_parallel * row.pipeline_parallel) == 0


@pytest.mark.parametrize("row", [*TABLE_1, *ZERO_3, *PTD], ids=name_of)
def test_the_model_shape_has_the_parameters_and_operations_of_equations_2_and_3(row: ThroughputRow) -> None:
    shape = gpt("GPT", row.layers, row.hidden, row.heads, VOCAB, SEQUENCE)
    # Equation 2 leaves out the last normalisation.
    assert shape.numel - 2 * row.hidden == pytest.approx(row.numel, rel=1e-12)
    assert shape.iteration_flops(row.batch, SEQUENCE, recompute=True) == pytest.approx(row.flops, rel=1e-12)


@pytest.mark.parametrize(
    ("numel_billions", "numel", "tokens", "gpus", "tflops", "days"),
    [("174.6", 175e9, 300e9, 1024, 140, 34), ("1008.0", 1e12, 450e9, 3072, 163, 84)],
)
def test_the_training_times_of_section_5_1_are_reproduced(
    numel_billions: str, numel: float, tokens: float, gpus: int, tflops: float, days: float
) -> None:
    assert approximate_training_s(tokens, numel, gpus, tflops * 1e12) / DAY_S == pytest.approx(days, abs=1)
    row = next(row for row in (*TABLE_1, *PTD) if row.numel_billions == numel_billions)
    exact_s = training_s(tokens, row.batch * SEQUENCE, row.flops, gpus, tflops * 1e12)
    assert exact_s / DAY_S == pytest.approx(days, abs=1.1)


@pytest.mark.parametrize("row", [*ZERO_3, *PTD], ids=name_of)
def test_the_training_times_of_table_2_are_reproduced(row: ThroughputRow) -> None:
    exact_s = training_s(TOKENS, row.batch * SEQUENCE, row.flops, row.gpus, row.tflops * 1e12)
    assert exact_s / DAY_S == pytest.approx(row.days, abs=1)
    assert approximate_training_s(TOKENS, row.numel, row.gpus, row.tflops * 1e12) / DAY_S == pytest.approx(
        row.days, rel=0.04
    )


def rows_of(rows: list[ThroughputRow], numel_billions: str) -> list[ThroughputRow]:
    return [row for row in rows if row.numel_billions == numel_billions]


def scaled_by_the_bubble(first: ThroughputRow, row: ThroughputRow) -> float:
    """Return the throughput of ``row`` that follows from that of ``first``."""
    return scaled_throughput(first.tflops, first.pipeline_parallel, first.micro_batches, row.micro_batches)


@pytest.mark.parametrize("numel_billions", MODELS_OF_TABLE_2)
def test_the_bubble_explains_the_strong_scaling_of_table_2(numel_billions: str) -> None:
    first, *others = rows_of(PTD, numel_billions)
    for row in others:
        assert scaled_by_the_bubble(first, row) == pytest.approx(row.tflops, rel=0.02)


def zero3_tflops(row: ThroughputRow, tflops: float, bytes_per_s: float) -> float:
    """Return the throughput per GPU of ZeRO-3: a micro-batch takes its arithmetic or its network, what is longer."""
    micro_batch_flops = row.flops / row.gpus / row.micro_batches
    network_s = 2 * zero3_elements(row.numel, row.data_parallel) / bytes_per_s
    return micro_batch_flops / max(micro_batch_flops / (tflops * 1e12), network_s) / 1e12


def fitted_zero3() -> tuple[float, float]:
    """Return TFLOP/s and network bytes per second of a GPU, fitted to the smaller model of table 2.

    Its first row is limited by arithmetic. In the other two rows an iteration takes equally long, although each GPU of
    the last one has half the arithmetic, so they are limited by the network.
    """
    first, *others = rows_of(ZERO_3, MODELS_OF_TABLE_2[0])
    network_s = [row.flops / row.gpus / (row.tflops * 1e12) for row in others]
    assert network_s[0] == pytest.approx(network_s[1], rel=0.01)
    sent = [2 * zero3_elements(row.numel, row.data_parallel) for row in others]
    return first.tflops, sum(sent) / sum(network_s)


def test_zero3_of_table_2_is_arithmetic_or_network_fitted_on_one_model_and_tested_on_the_other() -> None:
    fitted = fitted_zero3()
    assert fitted == (144, pytest.approx(15.7e9, rel=0.01))
    for row in rows_of(ZERO_3, MODELS_OF_TABLE_2[1]):
        assert zero3_tflops(row, *fitted) == pytest.approx(row.tflops, rel=0.12), "held out"


@pytest.mark.parametrize("row", ZERO_3, ids=name_of)
def test_the_predicted_iteration_of_a_job_reproduces_zero3_of_table_2(row: ThroughputRow) -> None:
    """Check the forward and backward that every planning command predicts, with the two rates of ``fitted_zero3``."""
    tflops, bytes_per_s = fitted_zero3()
    network = Network(ranks_per_node=8, all_gather_bytes_per_s=bytes_per_s, reduce_scatter_bytes_per_s=bytes_per_s)
    rates = PhaseRates(matrix=MatrixRate(limit_flops_per_s=tflops * 1e12), network=network)
    job = Job(
        shape=gpt("GPT", row.layers, row.hidden, row.heads, VOCAB, SEQUENCE),
        world_size=row.gpus,
        ranks_per_node=8,
        micro_batch=row.micro_batch,
        sequence=SEQUENCE,
        accumulation=row.micro_batches,
    )
    assert job.tokens == row.batch * SEQUENCE
    iteration_s = job.accumulation * (job.work.forward_s(rates) + job.work.backward_s(rates))
    assert row.flops / row.gpus / iteration_s / 1e12 == pytest.approx(row.tflops, rel=0.12)


@pytest.mark.parametrize("numel_billions", MODELS_OF_TABLE_2)
def test_with_twice_the_gpus_a_pipeline_is_predicted_to_be_as_far_ahead_of_zero3_as_in_the_paper(
    numel_billions: str,
) -> None:
    """Check section 5.2: 70 % ahead with twice the GPUs, and 6 % and 24 % with the fewest GPUs."""
    fitted = fitted_zero3()
    first, twice = rows_of(PTD, numel_billions)[:2]
    zero3_first, zero3_twice = rows_of(ZERO_3, numel_billions)[:2]
    ahead_first = first.tflops / zero3_tflops(zero3_first, *fitted)
    ahead_twice = scaled_by_the_bubble(first, twice) / zero3_tflops(zero3_twice, *fitted)
    assert 1 < ahead_first < 1.3
    assert ahead_twice >= 1.6


@pytest.mark.parametrize("gpus", [32, 128])
@pytest.mark.parametrize("batches", [32, 128, 512])
@pytest.mark.parametrize("data_parallel", [1, 2, 4, 8, 16, 32])
def test_the_bubble_beside_data_parallelism_is_that_of_the_pipeline(
    gpus: int, batches: int, data_parallel: int
) -> None:
    """Check figure 6: (n - d) / b' is (p - 1) / m with p = n / d stages and m = b' / d micro-batches."""
    share = bubble_share_beside_data_parallel(gpus, data_parallel, batches)
    by_hand = Fraction(gpus - data_parallel, batches)
    assert share == by_hand
    assert bubble_share(gpus // data_parallel, batches // data_parallel) == by_hand


SIZES = (1, 2, 4, 8, 16)
"""The micro-batches of figures 7 and 8."""


def micro_batch_time(size: int) -> float:
    """Return the time of a micro-batch in units of the limit, with X(b) proportional to b / (b + k).

    The two points are those that section 3.4 prints: throughput is 1.3 times that of one sequence with the largest
    micro-batch of figure 7, 16.
    """
    half = (1.3 - 1) / (1 - 1.3 / 16)
    assert (16 / (16 + half)) / (1 / (1 + half)) == pytest.approx(1.3)
    return size + half


@pytest.mark.parametrize(("sequences", "best"), [(128, 2), (512, 4)])
def test_the_best_micro_batch_of_figure_8_costs_at_most_3_percent_more_than_the_models(
    sequences: int, best: int
) -> None:
    """Check equation 1 with 8 stages. The paper's best micro-batch is 4 for both batches.

    A rate of the form b / (b + k) cannot have the best micro-batch 4 for both: the optimum of equation 1 grows with the
    root of the batch, so by a factor of 2 between them, which is the distance between two sizes.
    """
    assert best_micro_batch(sequences, 8, micro_batch_time, SIZES) == best
    least = batch_s(sequences, best, 8, micro_batch_time)
    assert batch_s(sequences, 4, 8, micro_batch_time) == pytest.approx(least, rel=0.03)
