"""Reproduce the tables and figures of the Megatron paper (arXiv 2104.04473), and check the layout of its pipeline."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from perf_model.cluster.layouts import layouts_of, predict_layouts
from perf_model.cluster.pipeline import (
    PipelineLayout,
    best_pipeline_layout,
    bubble_share,
    megatron_rates,
    pipeline_layout,
)
from perf_model.planner import UNIT_SIZES
from perf_model.prediction.memory import GPU_MARGIN_BYTES
from perf_model.presets.machines import MACHINES, SELENE
from perf_model.training_run.decoder import gpt
from perf_model.training_run.forecast import Forecast, MemoryLimits, Overlap
from perf_model.training_run.job import Job
from perf_model.training_run.micro_batch import PhaseRates
from tests.model.profiles import job as on_nodes

DATA = Path(__file__).parent / "data"
VOCAB, SEQUENCE = 51_200, 2048
"""The vocabulary, the tokens per sequence and the peak of an A100 in the paper (section 5)."""


class ThroughputRow(SimpleNamespace):
    """A row of table 1, of weak scaling, or of table 2, of ZeRO-3 ("zero3") and the paper's parallelism ("ptd")."""

    @property
    def flops(self) -> float:
        """Return the operations of one iteration with activation recomputation (section 5.1, equation 3)."""
        flops = 96.0 * self.batch * SEQUENCE * self.layers * self.hidden**2
        return flops * (1 + SEQUENCE / (6 * self.hidden) + VOCAB / (16 * self.layers * self.hidden))

    def __str__(self) -> str:
        return f"{self.scheme} {self.numel_billions} B on {self.gpus}"


def rows_of(name: str) -> list[ThroughputRow]:
    rows = []
    for texts in csv.DictReader((DATA / name).open(newline="")):
        values: dict[str, Any] = {"scheme": "ptd", "micro_batch": 1, **texts, "tflops": float(texts["tflops"])}
        if "model_parallel" in values:
            values["tensor_parallel"] = 8 if values["scheme"] == "ptd" else 1
            values["pipeline_parallel"] = int(values["model_parallel"]) // values["tensor_parallel"]
        integers = ("hidden", "heads", "layers", "tensor_parallel", "pipeline_parallel", "gpus", "batch", "micro_batch")
        rows.append(ThroughputRow(**values | {key: int(values[key]) for key in integers}))
    return rows


TABLE_1, TABLE_2 = rows_of("megatron_table1.csv"), rows_of("megatron_table2.csv")
ZERO_3, PTD = ([row for row in TABLE_2 if row.scheme == scheme] for scheme in ("zero3", "ptd"))
PROFILE = MACHINES[SELENE].profile(8)


def job_of(row: ThroughputRow, micro_batch: int = 1, tensor_parallel: int = 1) -> Job:
    shape = gpt("GPT", row.layers, row.hidden, row.heads, VOCAB, SEQUENCE)
    return on_nodes(shape, row.gpus, 8, micro_batch=micro_batch, tensor_parallel=tensor_parallel)


def rates_of(job: Job) -> PhaseRates:
    rates = megatron_rates(PROFILE, job)
    assert rates is not None
    return rates


def schedules(job: Job, batch: int, stages: int) -> list[PipelineLayout]:
    """Return the layouts that divide everything evenly, by their chunks: the first one is not interleaved."""
    unlimited, chunks = float("inf"), range(1, job.shape.layers + 1)
    found = (pipeline_layout(job, batch, rates_of(job), unlimited, stages, each) for each in chunks)
    return [layout for layout in found if layout is not None]


def of_megatron(row: ThroughputRow) -> float:
    """Return the TFLOP/s per GPU of Megatron-LM with the layout of the table. It does not print the chunks."""
    layouts = schedules(job_of(row, row.micro_batch, row.tensor_parallel), row.batch, row.pipeline_parallel)
    return row.flops / row.gpus / min(layout.iteration_s for layout in layouts) / 1e12


def of_zero_3(row: ThroughputRow) -> float:
    """Return the TFLOP/s per GPU that ``cluster`` predicts for the layout of ZeRO-3 in the table."""
    job = job_of(row)
    limits = MemoryLimits(gpu=PROFILE.gpu_memory_bytes, host=PROFILE.host_memory_bytes)
    layouts = layouts_of(job, row.batch, [1], [row.micro_batch])
    (found,), _ = predict_layouts(layouts, lambda layout: Forecast(layout, PROFILE, limits, Overlap(), UNIT_SIZES))
    return row.flops / row.gpus / found.predicted.iteration_s / 1e12


@pytest.mark.parametrize("row", [*TABLE_1, *PTD], ids=str)
def test_the_preset_gives_megatron_of_both_tables_within_10_percent(row: ThroughputRow) -> None:
    """Check the layouts of the tables. The rate of products is fitted to table 1, and table 2 is held out."""
    assert of_megatron(row) == pytest.approx(row.tflops, rel=0.1)


@pytest.mark.parametrize(("row", "ptd"), zip(ZERO_3, PTD, strict=True), ids=str)
def test_the_preset_gives_zero3_of_table_2_and_how_far_a_pipeline_is_ahead(
    row: ThroughputRow, ptd: ThroughputRow
) -> None:
    """Check the table that the network of the preset is fitted to. The rate of products is of table 1."""
    zero_3 = of_zero_3(row)
    assert zero_3 == pytest.approx(row.tflops, rel=0.2)
    assert ptd.numel_billions == row.numel_billions
    assert of_megatron(ptd) / zero_3 == pytest.approx(ptd.tflops / row.tflops, rel=0.25)


def test_the_interleaved_schedule_is_more_than_10_percent_faster_with_small_batches() -> None:
    """Check figure 12: GPT-3 with 12 stages of 8 GPUs. The gap closes as the batch grows."""
    job = replace(job_of(PTD[0], tensor_parallel=8), world_size=96)
    gains = []
    for batch in (12, 24, 36, 48, 60, 1536):
        default, *interleaved = schedules(job, batch, stages=12)
        assert default.chunks == 1
        gains.append(default.iteration_s / min(layout.iteration_s for layout in interleaved) - 1)
    assert gains == sorted(gains, reverse=True)
    assert min(gains[:5]) > 0.1 > 0.01 > gains[-1]


GPU_BYTES = MACHINES[SELENE].gpu_memory_bytes - GPU_MARGIN_BYTES
MANY_NODES = next(row for row in TABLE_1 if row.pipeline_parallel > 1)
DIFFERENT = {"1.7": (2, 1), "310.1": (8, 12), "529.6": (8, 21)}
"""The rows for which another tensor-parallel size is faster, or fewer stages fit than the paper uses."""


@pytest.mark.parametrize("row", TABLE_1, ids=str)
def test_the_sizes_that_fit_and_are_fastest_are_as_in_table_1(row: ThroughputRow) -> None:
    found = best_pipeline_layout(job_of(row), row.batch, rates_of(job_of(MANY_NODES)), GPU_BYTES)
    assert found is not None
    expected = DIFFERENT.get(row.numel_billions, (row.tensor_parallel, row.pipeline_parallel))
    assert (found.tensor_parallel, found.stages) == expected
    assert found.tensor_parallel * found.stages * found.data_parallel == row.gpus
    assert found.micro_batches * found.micro_batch * found.data_parallel == row.batch
    assert found.bubble == bubble_share(found.stages, found.micro_batches, found.chunks)
