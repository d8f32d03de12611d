"""Read tables 1 and 2 of the Megatron paper (arXiv 2104.04473)."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from perf_model.cluster.pipeline import PipelineLayout, megatron_rates, pipeline_layout
from perf_model.presets.machines import MACHINES, SELENE
from perf_model.training_run.decoder import gpt
from perf_model.training_run.job import Job
from perf_model.training_run.micro_batch import PhaseRates
from tests.cluster.paper_formulas import gpt_iteration_flops, gpt_numel

DATA = Path(__file__).parent / "data"
VOCAB, SEQUENCE, PEAK_TFLOPS = 51_200, 2048, 312
"""The vocabulary, the tokens per sequence and the peak of an A100 in the paper (section 5)."""


@dataclass(frozen=True, kw_only=True)
class ThroughputRow:
    """A row of one of the tables."""

    scheme: str
    numel_billions: str
    hidden: int
    heads: int
    layers: int
    tensor_parallel: int
    pipeline_parallel: int
    gpus: int
    batch: int
    micro_batch: int
    tflops: float

    @property
    def numel(self) -> float:
        """Return the parameters by equation 2."""
        return gpt_numel(self.layers, self.hidden, VOCAB, SEQUENCE)

    @property
    def flops(self) -> float:
        """Return the operations of one iteration by equation 3."""
        return gpt_iteration_flops(self.layers, self.hidden, VOCAB, SEQUENCE, self.batch)


PROFILE = MACHINES[SELENE].profile(8)
"""The machine of the paper as users name it."""


def job_of(row: ThroughputRow, micro_batch: int = 1, tensor_parallel: int = 1) -> Job:
    """Return the model of ``row`` on its GPUs."""
    return Job(
        shape=gpt("GPT", row.layers, row.hidden, row.heads, VOCAB, SEQUENCE),
        world_size=row.gpus,
        ranks_per_node=8,
        micro_batch=micro_batch,
        sequence=SEQUENCE,
        tensor_parallel=tensor_parallel,
    )


def rates_of(job: Job) -> PhaseRates:
    """Return the rates of Megatron-LM on the preset."""
    rates = megatron_rates(PROFILE, job)
    assert rates is not None
    return rates


def schedules(job: Job, batch: int, stages: int) -> list[PipelineLayout]:
    """Return the layouts that divide everything evenly, by their chunks: the first one is not interleaved."""
    unlimited, chunks = float("inf"), range(1, job.shape.layers + 1)
    found = (pipeline_layout(job, batch, rates_of(job), unlimited, stages, each) for each in chunks)
    return [layout for layout in found if layout is not None]


def table_1() -> list[ThroughputRow]:
    """Return table 1: weak scaling."""
    return [
        ThroughputRow(
            scheme="ptd",
            numel_billions=row["numel_billions"],
            **{key: int(row[key]) for key in ("hidden", "heads", "layers", "tensor_parallel", "pipeline_parallel")},
            gpus=int(row["gpus"]),
            batch=int(row["batch"]),
            micro_batch=1,
            tflops=float(row["tflops"]),
        )
        for row in _rows("megatron_table1.csv")
    ]


def table_2(scheme: str) -> list[ThroughputRow]:
    """Return the rows of ``scheme`` in table 2: ZeRO-3 ("zero3") or the paper's parallelism ("ptd")."""
    return [
        ThroughputRow(
            scheme=scheme,
            numel_billions=row["numel_billions"],
            **{key: int(row[key]) for key in ("hidden", "heads", "layers", "gpus", "batch", "micro_batch")},
            tensor_parallel=8 if scheme == "ptd" else 1,
            pipeline_parallel=int(row["model_parallel"]) // 8 if scheme == "ptd" else 1,
            tflops=float(row["tflops"]),
        )
        for row in _rows("megatron_table2.csv")
        if row["scheme"] == scheme
    ]


def _rows(name: str) -> list[dict[str, str]]:
    with (DATA / name).open(newline="") as file:
        return list(csv.DictReader(file))
