"""A gradient crosses PCIe once or not at all, unless its sum over micro-batches is in host memory.

The bytes are counted on the GPU in software, which has its own memory.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

from deep_opt_states.config import Config, parse_config
from perf_model.prediction.memory import MemoryKind, TrainingSetup, reserved_by_the_runtime
from perf_model.schedule.host_layout import Widths
from perf_model.schedule.workload import Range, Unit, Workload
from tests.launch import run_ranks

CPU, STREAMED = {"placement": "cpu"}, {"placement": "streamed"}
MIXED = {"placement": "stride", "update_stride": 2}

CASES = [(block, accumulation) for accumulation in (1, 3) for block in (CPU, STREAMED, MIXED)]
"""Blocks, and numbers of micro-batches per step."""


def test_gradients_cross_pcie_only_as_often_as_their_placement_requires() -> None:
    # Without a unit on the device, sums over micro-batches are in host memory, as if the device had no room for them.
    cases = [(block, accumulation, block != CPU) for block, accumulation in CASES]
    (finished,) = run_ranks(1, ["-m", "tests.zero.gradients.gradient_traffic_ranks", json.dumps(cases)], timeout_s=200)
    assert finished.returncode == 0, finished.output[-4000:]
    for (block, accumulation, sums_stay), found in zip(cases, finished.answers(), strict=True):
        check_traffic(block, accumulation, found, sums_stay=sums_stay)
        check_memory(block, accumulation, found)


def check_traffic(block: dict[str, Any], accumulation: int, found: dict[str, Any], *, sums_stay: bool) -> None:
    """Check the bytes and copies in each direction.

    ``sums_stay`` is true if sums over micro-batches stay on the accelerator, and false if they are in host memory, as
    stock's are.
    """
    label = f"{block}, {accumulation} micro-batches"
    once = found["steps"] * found["element_bytes"] * found["numel"]["cpu"]
    if accumulation > 1 and not sums_stay:
        assert (found["d2h_bytes"], found["h2d_bytes"]) == (accumulation * once, (accumulation - 1) * once), label
    else:
        assert (found["d2h_bytes"], found["h2d_bytes"], found["h2d_copies"]) == (once, 0, 0), label
    # If everything else is streamed, the gradients of persistent parameters are copied.
    assert 0 < found["d2h_copies"] < found["parameters"] * found["steps"] * accumulation, "copied together"


def check_memory(block: dict[str, Any], accumulation: int, found: dict[str, Any]) -> None:
    """Check that accelerator memory is reserved at start, as the memory model predicts, and not in backward."""
    label = f"{block}, {accumulation} micro-batches"
    config = parse_config({"deep_optimizer_states": block})
    assert isinstance(config, Config)
    units = [Unit(index, tuple(Range(*run) for run in ranges)) for index, ranges in enumerate(found["ranges"])]
    plan = config.plan(Workload((replace(units[0], is_persistent=True), *units[1:])))
    width = found["element_bytes"]
    setup = TrainingSetup(
        widths=Widths(param=width, grad=width),
        accumulates=accumulation > 1,
        longest_partition_numel=found["longest"],
    )
    declared = reserved_by_the_runtime(plan, setup)
    expected: Counter[int] = Counter()
    for reservation in declared:
        if reservation.kind is MemoryKind.ACCELERATOR:
            expected[reservation.each_bytes] += reservation.count
    reserved = Counter(each_bytes for kind, each_bytes in found["reserved"] if kind == MemoryKind.ACCELERATOR.value)
    assert reserved == +expected, label
    assert found["reserved while training"] == 0, label
    assert found["allocated"] == [], label


def test_the_peak_of_the_accelerators_memory_is_not_above_stocks() -> None:
    """Check that the buffers of gradients that are copied to the host take no more memory than stock's copies back.

    This includes the case in which sums over micro-batches are in host memory.
    """
    (finished,) = run_ranks(1, ["-m", "tests.zero.gradients.peak_memory_ranks", "1", "3"], timeout_s=200)
    assert finished.returncode == 0, finished.output[-4000:]
    answers = finished.answers()
    assert [found["accumulation"] for found in answers] == [1, 3]
    for found in answers:
        assert 0 < found["ours"] <= found["stock"], found
