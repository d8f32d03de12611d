"""Compare the predicted GPU memory of training with published peaks, and with sums by hand."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from perf_model.prediction.memory import MemoryUse, reserved_by_stock
from perf_model.presets.models import MODELS
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Workload
from perf_model.training_run.activations import SCORE_BYTES
from perf_model.training_run.families.decoder import DecoderWidths
from perf_model.training_run.forecast import forecast
from perf_model.training_run.host_reserve import reserved_host_bytes
from perf_model.training_run.job import Job
from perf_model.training_run.model import ModelError
from perf_model.training_run.predictor import Infeasible, MemoryLimits, Overlap, PredictedIteration
from perf_model.training_run.remedies import limits_to_lift
from perf_model.training_run.training_memory import PARAM_BYTES, WORKSPACE_BYTES, TrainingMemory, ZeroSizes
from perf_model.units import GB
from tests.model.llama_shapes import llama_shape
from tests.model.profiles import RATES, profile

GIB = 2**30

TOLERANCE = 0.10


@dataclass(frozen=True, kw_only=True)
class PublishedPeak:
    """A run of the published logs: what PyTorch allocated and held at the peak of one rank, in GiB.

    The logs round what is held to whole GiB. ``device_gb`` is the peak that the driver reported, in GB. ``on_gpu`` is
    the share of the sub-groups that Twin-Flow keeps on the GPU.
    """

    model: str
    ranks: int
    micro_batch: int
    allocated_gib: float
    held_gib: float
    device_gb: float | None = None
    on_gpu: float = 0.0

    @property
    def job(self) -> Job:
        """Return the run, with Megatron-LM's attention."""
        return Job(
            shape=MODELS[self.model],
            world_size=self.ranks,
            ranks_per_node=self.ranks,
            micro_batch=self.micro_batch,
            sequence=2048,
            attention="fused_softmax",
            sub_group_size=100_000_000,
        )

    @property
    def states_bytes(self) -> int:
        """Return the bytes of Twin-Flow's states on the GPU."""
        workload = Workload.from_numels([sum(part.numel for part in parts) for parts in self.job.sub_groups])
        count = round(self.on_gpu * len(workload.units))
        placements = (Placement.RESIDENT,) * count + (Placement.CPU,) * (len(workload.units) - count)
        plan = UpdatePlan(workload=workload, placements=placements, num_slots=1)
        return MemoryUse.from_reservations(reserved_by_stock(plan, PARAM_BYTES)).gpu_bytes


PUBLISHED = {
    "20B, gradients are copied asynchronously": PublishedPeak(
        model="20B", ranks=4, micro_batch=1, allocated_gib=14.62, held_gib=22, device_gb=27.8
    ),
    "20B, gradients are copied blocking": PublishedPeak(
        model="20B", ranks=4, micro_batch=1, allocated_gib=14.62, held_gib=18, device_gb=23.3
    ),
    "13B on 1 A100": PublishedPeak(model="13B", ranks=1, micro_batch=1, allocated_gib=26.32, held_gib=29),
    "13B on 4 A100": PublishedPeak(model="13B", ranks=4, micro_batch=4, allocated_gib=17.38, held_gib=21),
    "8.3B, a fifth on the GPU": PublishedPeak(
        model="8.3B", ranks=4, micro_batch=1, allocated_gib=17.53, held_gib=22, on_gpu=0.2
    ),
}
"""Runs of github.com/mauryaavinash95/deep-optimizer-states-results: ``act-output-20B-scale-twinflow`` (ratio 1.0),
``act-output-13B-monitor-mem-single-GPU``, ``act-output-13B-scale-gaps-scale-DP`` and
``act-output-scale-models-twinflow-0.8``, iterations 3 to 5: ``Max_MA`` and ``Max_CA`` of forward and backward."""


def outside_allocator(memory: TrainingMemory) -> int:
    return memory.context_bytes - WORKSPACE_BYTES


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_predicted_peak_is_that_of_the_published_run(name: str) -> None:
    peak = PUBLISHED[name]
    memory = peak.job.memory
    allocated_bytes = memory.gpu_bytes - outside_allocator(memory) + peak.states_bytes
    assert allocated_bytes == pytest.approx(peak.allocated_gib * GIB, rel=TOLERANCE)
    # What is held is compared together with what is not the allocator's, as the driver reports both.
    held_bytes = memory.gpu_bytes + memory.cache_bytes + peak.states_bytes
    device_bytes = peak.held_gib * GIB + outside_allocator(memory) if peak.device_gb is None else peak.device_gb * GB
    assert held_bytes == pytest.approx(device_bytes, rel=TOLERANCE)


def test_a_micro_batch_that_went_out_of_memory_leaves_no_room_for_the_cache_without_flash_attention() -> None:
    """Check the 20B model with 16 sequences on H100-80GB, which went out of memory; with 8 sequences it trained."""
    limit = 81_559 * 2**20
    job = replace(PUBLISHED["20B, gradients are copied asynchronously"].job, micro_batch=16, attention="eager")

    def held_bytes(job: Job) -> int:
        return job.gpu_bytes + job.memory.cache_bytes

    assert held_bytes(job) > limit
    assert held_bytes(replace(job, micro_batch=8)) < limit
    assert held_bytes(replace(job, attention="flash")) < limit


WIDTHS = DecoderWidths(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=128, vocab=100)
TINY = llama_shape("tiny", WIDTHS)


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
    return replace(job.memory, sizes=sizes)


def test_activations_are_as_summed_by_hand() -> None:
    kept, tokens = training(ZeroSizes(), recompute=False).activations, 100
    attention = (8 * 64 + 4 * 64 + 4 * 32) * tokens
    feed_forward = (8 * 64 + 8 * 128) * tokens
    assert kept.layer_bytes == attention + feed_forward
    assert kept.in_loss == 2 * kept.layer_bytes + (14 * 100 + 10 * 64) * tokens
    gradients = (4 * 128 + 4 * 64) * tokens
    assert kept.in_feed_forward(1) == 2 * kept.layer_bytes + gradients
    assert kept.in_attention(1) == kept.layer_bytes + attention + 4 * 64 * tokens
    computed_again = replace(kept, recompute=True)
    assert computed_again.in_feed_forward(1) == kept.layer_bytes + gradients + 2 * 2 * 64 * tokens
    scores = 4 * 50 * tokens
    eager = replace(kept, attention="eager")
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
    peak = max(at_the_end, alone.activations.peak_bytes + 2 * largest)
    assert alone.allocated_bytes <= alone.partition_bytes + alone.bucket_bytes + peak
    assert alone.allocated_bytes >= alone.partition_bytes + alone.bucket_bytes + at_the_end


def test_memory_grows_with_the_batch_and_shrinks_with_recomputation_and_ranks() -> None:
    job = Job(shape=MODELS["7B"], world_size=4, ranks_per_node=4, micro_batch=2, sequence=2048)
    assert replace(job, micro_batch=4).gpu_bytes > job.gpu_bytes > replace(job, world_size=8).gpu_bytes
    assert replace(job, recompute=False).gpu_bytes > job.gpu_bytes
    by_attention = [replace(job, attention=attention).activation_bytes for attention in SCORE_BYTES]
    assert by_attention == sorted(by_attention)
    with pytest.raises(ModelError, match=r"attention: must be one of flash, .*, found ring\.\nCorrect --attention\."):
        replace(job, attention="ring")


WITH_GPU = profile({**RATES, "matmul_flops_per_s": 1e15})


def test_every_way_to_train_leaves_the_margin_free() -> None:
    """Check GPUs whose memory is just enough for a way to train with the margin, and for it without the margin."""
    job = Job(shape=MODELS["7B"], world_size=4, ranks_per_node=4, micro_batch=1, sequence=2048)
    margin = 3 * GB
    resident_bytes = 14 * -(-job.shape.numel // 4)

    def outcomes(gpu_bytes: int) -> dict[str, object]:
        limits = MemoryLimits(gpu=gpu_bytes, host=None, gpu_margin=margin)
        return dict(forecast(job, WITH_GPU, limits, Overlap(), [100_000_000]).baselines)

    enough = job.gpu_bytes + resident_bytes + margin + 10**6
    assert isinstance(outcomes(enough)["no_offload"], PredictedIteration)
    refused = outcomes(enough - 2 * 10**6 - 200_000)["no_offload"]
    assert isinstance(refused, Infeasible)
    assert "--gpu-memory-gb" in refused.reason
    # All streamed takes two slots or more, and the gradients.
    with_margin = MemoryLimits(gpu=job.gpu_bytes + job.memory.cache_bytes + 6 * GB, host=None, gpu_margin=0)
    assert isinstance(
        forecast(job, WITH_GPU, with_margin, Overlap(), [100_000_000]).baselines["all_streamed"], PredictedIteration
    )
    without = replace(with_margin, gpu_margin=5 * GB)
    assert isinstance(forecast(job, WITH_GPU, without, Overlap(), [100_000_000]).baselines["all_streamed"], Infeasible)


def test_host_memory_keeps_room_for_the_system_and_the_processes() -> None:
    job = Job(shape=MODELS["7B"], world_size=4, ranks_per_node=4, micro_batch=1, sequence=2048)
    unlimited = forecast(job, WITH_GPU, MemoryLimits(gpu=60 * GB, host=None), Overlap(), [100_000_000])
    reserve = reserved_host_bytes(4, has_gpu=True)
    assert unlimited.reserved_host_bytes == reserve
    assert unlimited.memory.host_bytes == reserve + 4 * unlimited.planned.memory.host_bytes
    fits = MemoryLimits(gpu=60 * GB, host=unlimited.memory.host_bytes)
    assert forecast(job, WITH_GPU, fits, Overlap(), [100_000_000]).memory.host_bytes == fits.host
    with pytest.raises(ValueError, match="exceeds host memory by"):
        forecast(job, WITH_GPU, replace(fits, host=unlimited.memory.host_bytes - 4), Overlap(), [100_000_000])


def test_frozen_parameters_have_no_gradients_in_gpu_memory() -> None:
    job = Job(shape=MODELS["7B"], world_size=4, ranks_per_node=4, micro_batch=1, sequence=128)
    lora = replace(job, trainable_share=0.01)
    assert lora.memory.cache_bytes < job.memory.cache_bytes
    assert lora.gpu_bytes < job.gpu_bytes


def test_the_options_that_limit_are_named() -> None:
    text = limits_to_lift(["gpu_bytes", "pinned_bytes"])
    assert "--gpu-memory-gb" in text
    assert "--gpu-memory-margin-gb" in text
    assert "--pinned-memory-gb" in text
    assert "--host-memory-gb" not in text
