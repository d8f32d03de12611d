"""Check that a plan takes as much memory of the GPU as predicted, with gradients only where they are counted."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any

import pytest

from deep_opt_states.zero.internals.compat import partitions_by_name
from perf_model.prediction.memory import MemoryKind, TrainingSetup, memory_of, reserved_by_the_runtime, staging_buffers
from perf_model.schedule.cutting import cut_into_units
from perf_model.schedule.host_layout import Widths
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan, place_all
from tests.ranks import ranks
from tests.software_gpu import device
from tests.software_gpu.filled_gpu.growing_inputs import CASE, Step, train_on_gpu
from tests.software_gpu.filled_gpu.test_filled_gpu import scripted
from tests.software_gpu.ranks import software_process_group
from tests.software_gpu.settings import GIB
from tests.tiers import thorough
from tests.zero.parity.case import Case, by_name
from tests.zero.parity.training import Block, Record, assert_same_bits

# Two large layers. The states and gradients of each fill segments of the allocator. With smaller units, the free part
# of the last segment would be what is measured.
LARGE = replace(CASE, widths=(64, 2000, 2600, 2000, 64), dtype="fp32")
LARGE_LAYER, TOKENS, TOLERANCE = 5_203_000, 64, 0.05
CPU, STREAMED, RESIDENT = Placement.CPU, Placement.STREAMED, Placement.RESIDENT
PLANS = {"2 slots": (2, (STREAMED,)), "resident": (1, (RESIDENT,)), "mixed": (2, (RESIDENT, STREAMED, CPU))}
"""The slots, and the placements of the units in turn, of the plans that replace each other between steps."""


RULES = by_name({"layers.1.*": "resident", "layers.2.*": "streamed", "*": "cpu"})


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training run with the plan of the config ``block``, and then with ``plans``; without any, the planner decides.

    ``sums_of``: the plans with which the GPU has the sums also of units that the CPU updates. ``short_after``: the
    number of steps after which allocations are retried.
    """

    block: dict[str, Any]
    steps: int
    case: Case = LARGE
    memory_bytes: int = 4 * GIB
    plans: tuple[str, ...] = ()
    sums_of: tuple[str, ...] = ()
    short_after: int | None = None


TRAININGS = {
    "few plans": Training(block=RULES, plans=("2 slots", "resident"), steps=3),
    "accumulation": Training(
        block=RULES, case=replace(LARGE, accumulation=3), plans=tuple(PLANS), sums_of=("rules", *PLANS), steps=4
    ),
    "offload_param": Training(
        block=RULES, case=replace(LARGE, offload_param=True), plans=("2 slots", "resident"), steps=3
    ),
    # The budget is for the sums of all gradients, but for no states.
    "only sums": Training(
        block={"gpu_memory_gb": 0.046},
        case=replace(LARGE, accumulation=2),
        memory_bytes=GIB // 2,
        sums_of=("at start",),
        steps=6,
        short_after=3,
    ),
}
"""The trainings by name. Each has processes of its own, since each destroyed engine of stock leaves host memory."""

QUICK = ("few plans", "only sums")


def gradient_bytes(optimizer: Any) -> dict[Placement, int]:
    found = dict.fromkeys(Placement, 0)
    for unit, buffer in zip(optimizer._running.memory.units, optimizer._gradients._buffers, strict=True):
        for gradient in (buffer.grad, buffer.device_accumulator):
            if gradient is not None and not gradient.is_cpu:
                found[unit.placement] += gradient.untyped_storage().nbytes()
    return found


def check_memory(training: Training, name: str, optimizer: Any, allocated: int) -> None:
    running, case = optimizer._running, training.case
    plan, width = running.plan, 4 if case.dtype == "fp32" else 2
    accumulates, keeps_sums = case.accumulation > 1, name in training.sums_of
    setup = TrainingSetup(
        widths=Widths(param=width, grad=width, publishes=not case.offload_param),
        accumulates=accumulates,
        sums_on_accelerator=keeps_sums or not accumulates,
        params_on_host=case.offload_param,
    )
    # The GPU holds the gradients of streamed and resident units, and of others only if they are counted.
    expected = {placement: width * plan.numel(placement) for placement in Placement}
    if not keeps_sums:
        expected[CPU] = 0
    assert gradient_bytes(optimizer) == expected, name
    # The staging buffers stay as they are at start: for the first plan, or for any that the planner may choose later.
    first = optimizer._assembly.planned.plan
    if not training.plans:
        first = replace(first, placements=place_all(first.workload, CPU))
    longest = max(param.partition_numel() for group in optimizer.fp16_groups for param in group)
    staging = staging_buffers(first, replace(setup, longest_partition_numel=longest))
    tensors = [*reserved_by_the_runtime(plan, setup), *staging]
    with_staging = sum(each.count * each.each_bytes for each in tensors if each.kind is MemoryKind.ACCELERATOR)
    assert abs(allocated - with_staging) <= TOLERANCE * with_staging, name
    predicted = memory_of(plan, setup).gpu_bytes
    assert getattr(optimizer._gpu_memory, "bytes", predicted) == predicted, name
    before = device.memory_allocated()
    optimizer._before_eviction()
    running.evict()
    evicted = device.memory_allocated()
    assert running.restore()
    for moved in (before - evicted, device.memory_allocated() - evicted):
        assert abs(moved - predicted) <= TOLERANCE * predicted, name


def adopt(name: str, optimizer: Any) -> None:
    num_slots, placements = PLANS[name]
    optimizer._before_eviction()
    units = cut_into_units(partitions_by_name(optimizer), LARGE_LAYER)
    placed = tuple(islice(cycle(placements), len(units.units)))
    optimizer._running.adopt(UpdatePlan(workload=units, placements=placed, num_slots=num_slots))
    assert optimizer._running.restore()


def train(training: Training, block: Block, stock_bytes: int = 0) -> tuple[Record, int]:
    # Tensors that DeepSpeed has kept of the engine before are not counted.
    gc.collect()
    before = device.memory_allocated()
    allocated: list[int] = []

    def after_step(engine: Any, number: int) -> None:
        # Autograd and DeepSpeed may leave gradients in cycles of references.
        gc.collect()
        allocated.append(device.memory_allocated() - before)
        if block is None:
            return
        names = ("rules", *training.plans)
        if not training.plans:
            names = ("at start", *[""] * (training.steps - 2), "at the end")
        if name := names[number - 1]:
            check_memory(training, name, engine.optimizer, allocated[-1] - stock_bytes)
        if number <= len(training.plans):
            adopt(training.plans[number - 1], engine.optimizer)

    steps = [Step((TOKENS,) * training.case.accumulation)] * training.steps
    short = scripted(after=training.short_after, retries=1) if training.short_after else nullcontext()
    with short:
        record, _ = train_on_gpu(steps, block, training.memory_bytes, training.case, after_step)
    return record, min(allocated)


@pytest.mark.P5
@pytest.mark.parametrize("name", [*QUICK, *(thorough(name) for name in TRAININGS if name not in QUICK)])
@ranks(1, group=software_process_group, timeout_s=900)
def test_each_plan_takes_the_predicted_memory_of_the_gpu(name: str) -> None:
    training = TRAININGS[name]
    stock, stock_bytes = train(training, None)
    ours, _ = train(training, {"unit_size": LARGE_LAYER, **training.block}, stock_bytes)
    assert_same_bits(stock, ours)
