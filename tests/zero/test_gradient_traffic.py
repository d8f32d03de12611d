"""A gradient crosses PCIe once, or not at all: counted on the recording accelerator, which has a memory of its own."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from deep_opt_states.config import Config, parse_config
from perf_model.prediction.memory import Where, reserved_by_the_runtime
from perf_model.schedule.workload import Workload
from tests.launch import run_ranks

CPU, STREAMED = {"placement": "cpu"}, {"placement": "streamed"}
MIXED = {"placement": "stride", "update_stride": 2}

CASES = [(block, accumulation) for accumulation in (1, 3) for block in (CPU, STREAMED, MIXED)]
"""Blocks, and the micro-batches of a step."""


def test_bytes_by_direction() -> None:
    (finished,) = run_ranks(1, ["-m", "tests.zero.scripts.gradient_traffic", json.dumps(CASES)], timeout_s=200)
    assert finished.returncode == 0, finished.output[-4000:]
    for case, found in zip(CASES, finished.answers(), strict=True):
        # This accelerator keeps no sums where it updates nothing.
        check_traffic(*case, found, sums_stay=case[0] != CPU)
        check_memory(*case, found)


def check_traffic(block: dict[str, Any], accumulation: int, found: dict[str, Any], *, sums_stay: bool) -> None:
    """``sums_stay`` on the accelerator over micro-batches, or are in host memory, as stock's."""
    what = f"{block}, {accumulation} micro-batches"
    once = found["steps"] * found["element_bytes"] * found["numel"]["cpu"]
    if accumulation > 1 and not sums_stay:
        assert (found["d2h_bytes"], found["h2d_bytes"]) == (accumulation * once, (accumulation - 1) * once), what
    else:
        assert (found["d2h_bytes"], found["h2d_bytes"], found["h2d_copies"]) == (once, 0, 0), what
    if block == STREAMED:
        assert found["d2h_copies"] == 0, what
    else:
        assert 0 < found["d2h_copies"] < found["parameters"] * found["steps"] * accumulation, "few large ones"


def check_memory(block: dict[str, Any], accumulation: int, found: dict[str, Any]) -> None:
    """The accelerator's memory is reserved at start, as the memory model has it, and backward allocates none."""
    what = f"{block}, {accumulation} micro-batches"
    config = parse_config({"deep_optimizer_states": block})
    assert isinstance(config, Config)
    plan = config.plan(Workload.of(found["numels"]))
    declared = reserved_by_the_runtime(
        plan, found["element_bytes"], accumulates=accumulation > 1, longest_partition_numel=found["longest"]
    )
    expected: Counter[int] = Counter()
    for its in declared:
        if its.where is Where.ACCELERATOR:
            expected[its.each_bytes] += its.count
    taken = Counter(each_bytes for where, each_bytes in found["reserved"] if where == Where.ACCELERATOR.value)
    assert taken == +expected, what
    assert found["reserved while training"] == 0, what
    assert found["allocated"] == [], what


def test_the_peak_of_the_accelerators_memory_is_not_above_stocks() -> None:
    """The buffers for gradients on their way down take no more than what stock brings up again, also where sums over
    micro-batches are in host memory."""
    (finished,) = run_ranks(1, ["-m", "tests.zero.scripts.accelerator_peak", "1", "3"], timeout_s=200)
    assert finished.returncode == 0, finished.output[-4000:]
    for found in finished.answers():
        assert 0 < found["ours"] <= found["stock"], found
