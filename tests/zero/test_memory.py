"""The memory model against what the runtime reserves, and against the memory of a real engine's process."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from deep_opt_states.config import Config, parse_config
from perf_model.memory import reserved_by_deepspeed, reserved_by_stock, reserved_by_the_runtime
from perf_model.plan import UpdatePlan
from perf_model.workload import Workload
from tests.launch import run_ranks

BLOCKS: dict[str, dict[str, Any]] = {
    "all on the CPU": {"placement": "cpu"},
    "all streamed, 3 slots": {"placement": "streamed", "num_slots": 3},
    "all three": {"placement": ["resident", "cpu", "streamed", "streamed", "cpu", "resident"], "num_slots": 1},
}


def trained(block: str) -> dict[str, Any]:
    # So that what is freed goes back to the system at once, whatever its size.
    kept_by_nobody = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_ARENA_MAX": "1"}
    (finished,) = run_ranks(1, ["-m", "tests.zero.scripts.memory", block], timeout_s=200, **kept_by_nobody)
    assert finished.returncode == 0, finished.output[-4000:]
    answer: dict[str, Any] = finished.answers()[0]
    return answer


@pytest.fixture(scope="module")
def stock() -> dict[str, Any]:
    return trained("stock")


def planned(block: dict[str, Any], numels: list[int]) -> UpdatePlan:
    config = parse_config({"deep_optimizer_states": block})
    assert isinstance(config, Config)
    return config.plan(Workload.of(numels))


@pytest.mark.parametrize("name", BLOCKS)
def test_predicted_memory_is_what_is_taken(name: str, stock: dict[str, Any]) -> None:
    ours = trained(json.dumps(BLOCKS[name]))
    plan = planned(BLOCKS[name], ours["numels"])
    assert len(plan.placements) == 6
    predicted = reserved_by_the_runtime(plan, param_bytes=2)
    ledger = Counter((where, each_bytes) for where, each_bytes in map(tuple, ours["reserved"]))
    expected: Counter[tuple[str, int]] = Counter()
    for its in predicted:
        expected[its.where.value, its.each_bytes] += its.count
    assert ledger == +expected

    # On the CPU accelerator all of it is host memory, served to the byte; it takes the place of stock's states.
    plan_of_stock = planned({"placement": "cpu"}, stock["numels"])
    stocks = sum(its.count * its.each_bytes for its in reserved_by_stock(plan_of_stock, 2))
    stocks -= sum(its.count * its.each_bytes for its in reserved_by_deepspeed(plan_of_stock, 2))
    growth = sum(its.count * its.each_bytes for its in predicted) - stocks
    assert growth >= 50e6, "a growth that the noise of a process cannot hide"
    assert ours["rss_bytes"] - stock["rss_bytes"] == pytest.approx(growth, abs=12e6)
