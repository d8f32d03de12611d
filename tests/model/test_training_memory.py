"""Compare the predicted GPU memory of training with published peaks, and with sums by hand."""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from typing import Any

import pytest

from benchmarks.published.runs import GPUS_PER_NODE, read_runs
from perf_model.prediction.memory import MemoryUse, reserved_by_stock
from perf_model.presets.models import MODELS, paper_model
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Workload
from perf_model.training_run.decoder import llama
from perf_model.training_run.forecast import Forecast, Infeasible, MemoryLimits, Overlap, PredictedIteration
from perf_model.training_run.job import Job
from perf_model.training_run.training_memory import (
    SCORE_BYTES,
    WORKSPACE_BYTES,
    TrainingMemory,
    ZeroSizes,
    reserved_host_bytes,
)
from perf_model.units import GB
from tests.launch import REPOSITORY
from tests.model.profiles import RATES, profile

GIB = 2**30

TOLERANCE = 0.10

PEAKS = REPOSITORY / "benchmarks" / "data" / "published_peaks.csv"

SHAPES = {**MODELS, "30B": paper_model("30B", layers=60, hidden=6656, heads=52, numel=27.75e9)}


@dataclass(frozen=True, kw_only=True)
class PublishedPeak:
    """A run of the published logs: what PyTorch allocated and held at the peak of one rank, in GiB.

    The logs round what is held to whole GiB. ``device_gb`` is the peak that the driver reported, in GB. ``cpu_ratio``
    is the share of the sub-groups that Twin-Flow does not keep on the GPU.
    """

    name: str
    model: str
    ranks: int
    micro_batch: int
    cpu_ratio: float
    allocated_gib: float
    held_gib: float
    device_gb: float | None

    @classmethod
    def from_row(cls, row: dict[str, str]) -> PublishedPeak:
        kind = "blocking" if row["blocking"] == "1" else "asynchronous"
        return cls(
            name=f"{row['sweep']}, {row['model_name']}, dp {row['dp']}, {row['cpu_ratio']}, {kind}",
            model=row["model_name"],
            ranks=int(row["dp"]),
            micro_batch=int(row["micro_batch"]),
            cpu_ratio=float(row["cpu_ratio"]),
            allocated_gib=float(row["allocated_gib"]),
            held_gib=float(row["held_gib"]),
            device_gb=float(row["device_gb"]) if row["device_gb"] else None,
        )

    @property
    def job(self) -> Job:
        """Return the run, with Megatron-LM's attention."""
        return Job(
            shape=SHAPES[self.model],
            world_size=self.ranks,
            ranks_per_node=min(GPUS_PER_NODE, self.ranks),
            micro_batch=self.micro_batch,
            sequence=2048,
            attention="fused_softmax",
            sub_group_size=100_000_000,
        )

    @property
    def states_bytes(self) -> int:
        """Return the bytes of Twin-Flow's states on the GPU."""
        workload = Workload.from_numels([sum(part.numel for part in parts) for parts in self.job.sub_groups])
        on_cpu = int(self.cpu_ratio * len(workload.units))
        placements = (Placement.RESIDENT,) * (len(workload.units) - on_cpu) + (Placement.CPU,) * on_cpu
        plan = UpdatePlan(workload=workload, placements=placements, num_slots=1)
        return MemoryUse.from_reservations(reserved_by_stock(plan)).gpu_bytes

    @property
    def allocated_error(self) -> float:
        """Return the relative error of what is allocated."""
        memory = TrainingMemory(self.job)
        return (memory.gpu_bytes - outside_allocator(memory) + self.states_bytes) / (self.allocated_gib * GIB) - 1

    @property
    def held_error(self) -> float:
        """Return the relative error of what is held, together with what is not the allocator's, as the driver does."""
        memory = TrainingMemory(self.job)
        held_bytes = memory.gpu_bytes + memory.cache_bytes + self.states_bytes
        logged_bytes = self.held_gib * GIB + outside_allocator(memory)
        return held_bytes / (logged_bytes if self.device_gb is None else self.device_gb * GB) - 1


PUBLISHED = [PublishedPeak.from_row(row) for row in csv.DictReader(PEAKS.read_text().splitlines())]
"""The published stock runs whose log was read: ``benchmarks/data/README.md`` has the rule."""

HELD_LESS_WELL = {
    "7B-scale-gaps-a100, 7B, dp 4, 1.0, asynchronous": -0.178,
    "7B-scale-DP, 7B, dp 8, 1.0, asynchronous": 0.104,
}
"""The runs whose cache is not predicted within the aim, with the errors of what is held."""


def outside_allocator(memory: TrainingMemory) -> int:
    return memory.context_bytes - WORKSPACE_BYTES


@pytest.mark.parametrize("peak", PUBLISHED, ids=lambda peak: peak.name)
def test_the_predicted_peak_is_that_of_the_published_run(peak: PublishedPeak) -> None:
    assert abs(peak.allocated_error) < TOLERANCE + 0.0005, "the aim, rounded to a tenth of a percent"
    if peak.name in HELD_LESS_WELL:
        assert peak.held_error == pytest.approx(HELD_LESS_WELL[peak.name], abs=0.0005)
    else:
        assert abs(peak.held_error) < TOLERANCE


def test_the_published_peaks_are_of_stock_runs_in_the_file_of_runs() -> None:
    assert len(PUBLISHED) == 23
    runs = {
        (run.sweep, run.model_name, run.setting.ranks, run.setting.cpu_ratio)
        for run in read_runs()
        if run.setting.update_stride is None
    }
    rows = list(csv.DictReader(PEAKS.read_text().splitlines()))
    asynchronous = [row for row in rows if row["blocking"] == "0"]
    assert len(asynchronous) == 21
    for row in asynchronous:
        assert (row["sweep"], row["model_name"], int(row["dp"]), float(row["cpu_ratio"])) in runs


def test_a_micro_batch_that_went_out_of_memory_leaves_no_room_for_the_cache_without_flash_attention() -> None:
    """Check the 20B model with 16 sequences on H100-80GB, which went out of memory; with 8 sequences it trained."""
    limit = 81_559 * 2**20
    (peak,) = [peak for peak in PUBLISHED if peak.name == "20B-scale-twinflow, 20B, dp 4, 1.0, asynchronous"]
    job = replace(peak.job, micro_batch=16, attention="eager")

    def held_bytes(job: Job) -> int:
        return TrainingMemory(job).gpu_bytes + TrainingMemory(job).cache_bytes

    assert held_bytes(job) > limit
    assert held_bytes(replace(job, micro_batch=8)) < limit
    assert held_bytes(replace(job, attention="flash")) < limit


TINY = llama("tiny", layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=128, vocab=100)


def training(sizes: ZeroSizes, *, ranks: int = 1, recompute: bool = True, attention: str = "flash") -> TrainingMemory:
    job = Job(
        shape=TINY,
        world_size=ranks,
        ranks_per_node=ranks,
        micro_batch=2,
        sequence=50,
        recompute=recompute,
        attention=attention,
    )
    return TrainingMemory(job, sizes)


def test_activations_are_as_summed_by_hand() -> None:
    kept, tokens = training(ZeroSizes(), recompute=False), 100
    attention = (8 * 64 + 4 * 64 + 4 * 32) * tokens
    feed_forward = (8 * 64 + 8 * 128) * tokens
    assert kept.layer_bytes == attention + feed_forward
    assert kept.activation_bytes == 2 * kept.layer_bytes + (14 * 100 + 10 * 64) * tokens
    gradients = (4 * 128 + 4 * 64) * tokens
    assert kept.in_feed_forward(1) == 2 * kept.layer_bytes + gradients
    assert kept.in_attention(1) == kept.layer_bytes + attention + 4 * 64 * tokens
    computed_again = TrainingMemory(replace(kept.job, recompute=True))
    assert computed_again.in_feed_forward(1) == kept.layer_bytes + gradients + 2 * 2 * 64 * tokens
    scores = 4 * 50 * tokens
    eager = TrainingMemory(replace(kept.job, attention="eager"))
    assert eager.layer_bytes == attention + feed_forward + 4 * 32 * tokens + 6 * scores


def test_buckets_and_gathered_parameters_are_as_summed_by_hand() -> None:
    numel = TINY.numel
    norms = 5 * 64
    sizes = ZeroSizes(reduce_bucket=10**6, prefetch_bucket=500, max_live=40_000, persistence_threshold=64)
    alone, two = training(sizes), training(sizes, ranks=2)
    assert alone.partition_bytes == 2 * numel
    assert alone.gathered_bytes == 0, "a single rank gathers nothing"
    assert two.partition_bytes == numel
    assert two.gathered_bytes == 2 * (norms + 40_000 + 500)
    smaller_than_a_layer = training(replace(sizes, max_live=20_000), ranks=2)
    assert smaller_than_a_layer.gathered_bytes == 2 * (norms + 20_000 + 2 * 64 * 128 + 500)
    assert alone.bucket_bytes == 2 * 10**6, "the bucket has its full size for every model"
    # All gradients are in the bucket until backward ends, when they are copied to a flat buffer.
    largest = 64 * 128
    at_the_end = 2 * numel + (2 + 8) * largest
    peak = max(at_the_end, alone.activation_bytes + 2 * largest)
    assert alone.allocated_bytes <= alone.partition_bytes + alone.bucket_bytes + peak
    assert alone.allocated_bytes >= alone.partition_bytes + alone.bucket_bytes + at_the_end


def test_memory_grows_with_the_batch_and_shrinks_with_recomputation_and_ranks() -> None:
    job = Job(shape=MODELS["7B"], world_size=4, ranks_per_node=4, micro_batch=2, sequence=2048)

    def gpu_bytes(**changes: Any) -> int:
        return TrainingMemory(replace(job, **changes)).gpu_bytes

    assert gpu_bytes(micro_batch=4) > gpu_bytes() > gpu_bytes(world_size=8)
    assert gpu_bytes(recompute=False) > gpu_bytes()
    by_attention = [TrainingMemory(replace(job, attention=attention)).activation_bytes for attention in SCORE_BYTES]
    assert by_attention == sorted(by_attention)


WITH_GPU = profile({**RATES, "matmul_flops_per_s": 1e15})


def test_every_way_to_train_leaves_the_margin_free() -> None:
    """Check GPUs whose memory is just enough for a way to train with the margin, and for it without the margin."""
    job = Job(shape=MODELS["7B"], world_size=4, ranks_per_node=4, micro_batch=1, sequence=2048)
    margin = 3 * GB
    resident_bytes = 14 * -(-job.shape.numel // 4)

    def outcomes(gpu_bytes: int) -> dict[str, object]:
        limits = MemoryLimits(gpu=gpu_bytes, host=None, gpu_margin=margin)
        return dict(Forecast(job, WITH_GPU, limits, Overlap(), [100_000_000]).baselines)

    enough = TrainingMemory(job).gpu_bytes + resident_bytes + margin + 10**6
    assert isinstance(outcomes(enough)["no_offload"], PredictedIteration)
    refused = outcomes(enough - 2 * 10**6 - 200_000)["no_offload"]
    assert isinstance(refused, Infeasible)
    assert "--gpu-memory-gb" in refused.reason
    # All streamed takes two slots or more, and the gradients.
    training = TrainingMemory(job)
    with_margin = MemoryLimits(gpu=training.gpu_bytes + training.cache_bytes + 6 * GB, host=None, gpu_margin=0)
    assert isinstance(
        Forecast(job, WITH_GPU, with_margin, Overlap(), [100_000_000]).baselines["all_streamed"], PredictedIteration
    )
    without = replace(with_margin, gpu_margin=5 * GB)
    assert isinstance(Forecast(job, WITH_GPU, without, Overlap(), [100_000_000]).baselines["all_streamed"], Infeasible)


def test_host_memory_keeps_room_for_the_system_and_the_processes() -> None:
    job = Job(shape=MODELS["7B"], world_size=4, ranks_per_node=4, micro_batch=1, sequence=2048)
    unlimited = Forecast(job, WITH_GPU, MemoryLimits(gpu=60 * GB, host=None), Overlap(), [100_000_000])
    reserve = reserved_host_bytes(4, has_gpu=True)
    assert unlimited.reserved_host_bytes == reserve
    assert unlimited.memory.host_bytes == reserve + 4 * unlimited.planned.memory.host_bytes
    fits = MemoryLimits(gpu=60 * GB, host=unlimited.memory.host_bytes)
    assert Forecast(job, WITH_GPU, fits, Overlap(), [100_000_000]).memory.host_bytes == fits.host
    with pytest.raises(ValueError, match="exceeds host memory by"):
        Forecast(job, WITH_GPU, replace(fits, host=unlimited.memory.host_bytes - 4), Overlap(), [100_000_000])


@pytest.mark.parametrize("offload_param", [False, True])
def test_stock_runs_exactly_where_its_memory_fits(offload_param: bool) -> None:
    job = Job(
        shape=MODELS["7B"], world_size=4, ranks_per_node=4, micro_batch=1, sequence=2048, offload_param=offload_param
    )
    limits = MemoryLimits(gpu=60 * GB, host=None)
    needed = Forecast(job, WITH_GPU, limits, Overlap(), [100_000_000]).memory_of_stock.host_bytes
    for host, outcome in ((needed, PredictedIteration), (needed - 4, Infeasible)):
        found = Forecast(job, WITH_GPU, replace(limits, host=host), Overlap(), [100_000_000])
        assert isinstance(found.baselines["stock"], outcome)
        assert found.memory_of_stock.host_bytes == needed


def test_frozen_parameters_have_no_gradients_in_gpu_memory() -> None:
    job = Job(shape=MODELS["7B"], world_size=4, ranks_per_node=4, micro_batch=1, sequence=128)
    lora = replace(job, trainable_share=0.01)
    assert TrainingMemory(lora).cache_bytes < TrainingMemory(job).cache_bytes
    assert TrainingMemory(lora).gpu_bytes < TrainingMemory(job).gpu_bytes
