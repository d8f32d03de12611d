"""Check the predicted memory of updates and of training: by hand, against published peaks, and with states on disk."""

from __future__ import annotations

import csv
from dataclasses import replace
from functools import partial
from itertools import chain

import pytest

from benchmarks.published.runs import GPUS_PER_NODE
from perf_model.plan_request import PlanRequest
from perf_model.prediction.cost import CostModel, DiskRates, Resource
from perf_model.prediction.memory import (
    DEFAULT_SETUP,
    MIB,
    Budgets,
    MemoryKind,
    MemoryUse,
    Reservation,
    TrainingSetup,
    cuda_bytes_of,
    memory_of,
    reserved_by_stock,
)
from perf_model.prediction.overlap_windows import Windows
from perf_model.prediction.work_bound import work_bound
from perf_model.presets.models import MODELS, paper_model
from perf_model.schedule.cutting import place_on_disk
from perf_model.schedule.host_layout import SIXTEEN_BIT, WIDTHS_OF_STATES, Widths
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Partition, Workload
from perf_model.training_run.decoder import llama
from perf_model.training_run.job import Job
from perf_model.training_run.training_memory import WORKSPACE_BYTES, TrainingMemory, ZeroSizes
from perf_model.units import GB
from tests.launch import REPOSITORY
from tests.model.costs import plan_of
from tests.model.profiles import job as job_of
from tests.model.profiles import profile

CPU, STREAMED, RESIDENT = Placement.CPU, Placement.STREAMED, Placement.RESIDENT
NUMEL = 2**24
"""The length of 64 MiB of fp32: neither blocks nor powers of two are rounded."""

SHARED = Widths(param=2, grad=2, publishes=False)
BF16, BF16_MASTERS = WIDTHS_OF_STATES["bf16"], WIDTHS_OF_STATES["bf16-masters"]
ACCUMULATES = TrainingSetup(accumulates=True)
plan = partial(plan_of, numel=NUMEL)


@pytest.mark.parametrize(
    ("each_bytes", "count", "taken"),
    [
        (0, 3, 0),
        # Small blocks share a segment of 2 MiB, and are multiples of 512 B.
        (1, 4096, 2 * MIB),
        (1, 4097, 4 * MIB),
        (MIB, 3, 4 * MIB),
        # Blocks below 10 MiB share a segment of 20 MiB.
        (MIB + 1, 1, 20 * MIB),
        (5 * MIB, 5, 40 * MIB),
        (9 * MIB, 3, 40 * MIB),
        # Each larger block has its own segment.
        (21 * MIB + 1, 2, 44 * MIB),
    ],
)
def test_gpu_memory_is_taken_in_whole_segments(each_bytes: int, count: int, taken: int) -> None:
    assert cuda_bytes_of([Reservation(kind=MemoryKind.ACCELERATOR, each_bytes=each_bytes, count=count)]) == taken


@pytest.mark.parametrize(
    ("drawn", "setup", "gpu", "pinned", "eager"),
    [
        # p, m, v, the gradient and the rounded parameters are pinned. An fp32 model has nothing to round.
        (plan(CPU), DEFAULT_SETUP, 0, 16, 0),
        (plan(CPU), TrainingSetup(widths=Widths(param=4, grad=4)), 0, 16, 0),
        (plan(CPU), TrainingSetup(widths=BF16_MASTERS), 0, 12, 0),
        (plan(CPU), TrainingSetup(widths=BF16), 0, 8, 0),
        # Residents can return to host memory.
        (plan(RESIDENT), DEFAULT_SETUP, 14, 16, 0),
        (plan(RESIDENT), TrainingSetup(widths=BF16), 8, 8, 0),
        # There is one set of p, m and v per slot, at most one slot per unit, and all gradients.
        (plan(*[STREAMED] * 3, num_slots=2), DEFAULT_SETUP, 2 * 12 + 3 * 2, 3 * 16, 0),
        (plan(*[STREAMED] * 3, num_slots=4), DEFAULT_SETUP, 3 * 12 + 3 * 2, 3 * 16, 0),
        (plan(*[STREAMED] * 2, num_slots=2), TrainingSetup(widths=BF16_MASTERS), 2 * 10 + 2 * 2, 2 * 12, 0),
        # The sums of all gradients are on the accelerator if anything is updated there, or if they have to be.
        (plan(CPU, STREAMED, RESIDENT), ACCUMULATES, 2 * 12 + 3 * 2, 3 * 16, 0),
        (plan(CPU, CPU), ACCUMULATES, 0, 2 * 16, 0),
        (plan(CPU, CPU), replace(ACCUMULATES, sums_on_accelerator=True), 2 * 2, 2 * 16, 0),
        (plan(CPU, STREAMED, RESIDENT), replace(ACCUMULATES, sums_on_accelerator=False), 2 * 12 + 2 * 2, 3 * 16, 0),
        # Eager units have a second version of their states, and of a 16-bit model that the CPU rounds to in place.
        (plan(CPU, CPU, eager=frozenset({1})), DEFAULT_SETUP, 0, 2 * 16, 12),
        (plan(CPU, CPU, eager=frozenset({1})), TrainingSetup(widths=BF16), 0, 2 * 8, 6),
        (plan(CPU, CPU, eager=frozenset({1})), TrainingSetup(widths=SHARED, params_on_host=True), 0, 2 * 14, 14),
        # Parameters in host memory are staged in one buffer in addition to the gradients.
        (plan(CPU, STREAMED), TrainingSetup(widths=SHARED, params_on_host=True), 12 + 2 + 2, 2 * 14, 0),
    ],
)
def test_an_update_takes_the_bytes_per_parameter_that_are_counted_by_hand(
    drawn: UpdatePlan, setup: TrainingSetup, gpu: int, pinned: int, eager: int
) -> None:
    memory = memory_of(drawn, setup)
    found = memory.gpu_bytes, memory.pinned_bytes, memory.eager_bytes
    assert found == (gpu * NUMEL, pinned * NUMEL, eager * NUMEL)
    assert memory.host_bytes == (pinned + eager) * NUMEL
    missing = {"eager_bytes": eager * NUMEL} if eager else {}
    assert Budgets().missing(memory) == missing
    assert Budgets(eager_bytes=eager * NUMEL).missing(memory) == {}


def test_stock_pins_nothing_and_rounds_and_sums_in_host_memory() -> None:
    stock = MemoryUse.from_reservations(reserved_by_stock(plan(CPU, RESIDENT)))
    assert stock == MemoryUse(gpu_bytes=16 * NUMEL, host_bytes=(12 + 4 + 2 * 2) * NUMEL, pinned_bytes=0)
    # The gradient has the dtype of the masters, and the sums of gradients the model's dtype.
    assert MemoryUse.from_reservations(reserved_by_stock(plan(CPU), BF16)).host_bytes == (6 + 2 + 2) * NUMEL


MILLION = 10**6
LAYERS = [Partition(f"layers.{index}.weight", 4 * MILLION) for index in range(10)]
NORMS = [Partition(f"layers.{index}.norm", 5000, is_persistent=True) for index in range(10)]
DISK = DiskRates.one_after_the_other(6e9, 4e9)


def on_disk(host_bytes: int, **options: object) -> list[str]:
    placed = place_on_disk([LAYERS, NORMS], SIXTEEN_BIT, host_bytes, **options)  # type: ignore[arg-type]
    return [partition.name for partition in chain.from_iterable(placed) if partition.is_on_disk]


def test_the_last_layers_are_on_disk_as_many_as_needed() -> None:
    all_bytes = 16 * sum(partition.numel for partition in [*LAYERS, *NORMS])
    few = on_disk(all_bytes - 12 * 4 * MILLION, disk_unit_size=MILLION)
    assert few == ["layers.8.weight", "layers.9.weight"], "the second makes room for the disk slots"
    assert on_disk(all_bytes) == []
    resident = on_disk(0, placement_of=lambda name: RESIDENT if name.startswith("layers.9") else None)
    assert resident == [partition.name for partition in LAYERS[:-1]]
    assert on_disk(0) == [partition.name for partition in LAYERS]


def test_a_plan_with_states_on_disk_is_bound_by_the_disk_and_hides_reads_and_writes() -> None:
    placed = place_on_disk([LAYERS, NORMS], SIXTEEN_BIT, 0)
    cost = CostModel.from_profile(profile()).with_disk(DISK, SIXTEEN_BIT)
    no_gpu = Budgets(gpu_bytes=0)
    request = PlanRequest(sub_groups=placed, unit_sizes=(5 * MILLION,), cost=cost, budgets=no_gpu, windows=Windows())
    planned = request.plan()
    bound = work_bound(planned.plan.workload, cost, 0)
    numel = planned.plan.workload.on_disk_numel
    assert bound.binding is Resource.DISK
    assert bound.seconds == pytest.approx(12 * numel / 6e9 + 12 * numel / 4e9)
    assert bound.seconds <= planned.update_s <= 1.3 * bound.seconds
    # Each of the three slots holds two layers.
    unit_bytes = 12 * 8 * MILLION
    overlapped = replace(request, windows=Windows(backward_s=5.0, forward_s=0.001)).plan()
    hidden_s = planned.exposed_s - overlapped.exposed_s
    assert 3 * unit_bytes / 6e9 < hidden_s < 3 * unit_bytes / 6e9 + 3 * unit_bytes / 4e9


SHAPES = {**MODELS, "30B": paper_model("30B", layers=60, hidden=6656, heads=52, numel=27.75e9)}
PEAKS = list(csv.DictReader((REPOSITORY / "benchmarks/data/published_peaks.csv").open()))
"""The published stock runs whose log was read: ``benchmarks/data/README.md`` has the rule."""

HELD_LESS_WELL = {
    ("7B-scale-gaps-a100", "7B", "4", "1.0", "0"): -0.178,
    ("7B-scale-DP", "7B", "8", "1.0", "0"): 0.104,
}
"""The errors of runs whose cache is not predicted within 10 %."""


def states_bytes(job: Job, cpu_ratio: float) -> int:
    """Return the bytes of Twin-Flow's states on the GPU: ``cpu_ratio`` of the sub-groups are not there."""
    workload = Workload.from_numels([sum(part.numel for part in parts) for parts in job.sub_groups])
    on_cpu = int(cpu_ratio * len(workload.units))
    placements = (RESIDENT,) * (len(workload.units) - on_cpu) + (CPU,) * on_cpu
    plan = UpdatePlan(workload=workload, placements=placements, num_slots=1)
    return MemoryUse.from_reservations(reserved_by_stock(plan)).gpu_bytes


@pytest.mark.parametrize("row", PEAKS, ids=lambda row: f"{row['sweep']}, {row['model_name']}, dp {row['dp']}")
def test_the_predicted_peak_equals_the_published_run(row: dict[str, str]) -> None:
    """Check what PyTorch allocated, and what it held, with what is not the allocator's, as the driver reports it."""
    ranks, more = int(row["dp"]), {"attention": "fused_softmax", "sub_group_size": 100_000_000}
    shape, on_node = SHAPES[row["model_name"]], min(GPUS_PER_NODE, ranks)
    job = job_of(shape, ranks, on_node, micro_batch=int(row["micro_batch"]), **more)
    memory, on_gpu_bytes = TrainingMemory(job), states_bytes(job, float(row["cpu_ratio"]))
    outside_bytes = memory.context_bytes - WORKSPACE_BYTES
    allocated_bytes = memory.gpu_bytes - outside_bytes + on_gpu_bytes
    # The aim, rounded to a tenth of a percent.
    assert abs(allocated_bytes / (float(row["allocated_gib"]) * 2**30) - 1) < 0.1005
    logged_bytes = float(row["held_gib"]) * 2**30 + outside_bytes
    held_bytes = memory.gpu_bytes + memory.cache_bytes + on_gpu_bytes
    error = held_bytes / (float(row["device_gb"]) * GB if row["device_gb"] else logged_bytes) - 1
    kind = row["sweep"], row["model_name"], row["dp"], row["cpu_ratio"], row["blocking"]
    assert abs(error) < 0.1 if kind not in HELD_LESS_WELL else error == pytest.approx(HELD_LESS_WELL[kind], abs=5e-4)


TINY = llama("tiny", layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=128, vocab=100)


def training(sizes: ZeroSizes, ranks: int = 1) -> TrainingMemory:
    return TrainingMemory(job_of(TINY, ranks, micro_batch=2, sequence=50), sizes)


def test_buckets_and_gathered_parameters_are_as_summed_by_hand() -> None:
    numel, norms, largest = TINY.numel, 5 * 64, 64 * 128
    sizes = ZeroSizes(reduce_bucket=10**6, prefetch_bucket=500, max_live=40_000, persistence_threshold=64)
    alone, two = training(sizes), training(sizes, ranks=2)
    assert (alone.partition_bytes, two.partition_bytes) == (2 * numel, numel)
    assert (alone.gathered_bytes, two.gathered_bytes) == (0, 2 * (norms + 40_000 + 500))
    smaller_than_a_layer = training(replace(sizes, max_live=20_000), ranks=2)
    assert smaller_than_a_layer.gathered_bytes == 2 * (norms + 20_000 + 2 * largest + 500)
    # The bucket has its full size for every model. It holds all gradients until backward ends, when they are copied to
    # a flat buffer.
    bucket_bytes = 2 * 10**6
    at_the_end = 2 * numel + (2 + 8) * largest
    in_backward = alone.allocated_bytes - alone.partition_bytes - bucket_bytes
    assert at_the_end <= in_backward <= max(at_the_end, alone.activation_bytes + 2 * largest)
