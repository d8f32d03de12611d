"""Compare the memory model with the reservations of the runtime and with the memory of a real engine's process."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest

from deep_opt_states.config import Config, parse_config
from perf_model.prediction.memory import Reservation, TrainingSetup, reserved_by_stock, reserved_by_the_runtime
from perf_model.schedule.host_layout import Widths
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Partition
from tests.launch import run_ranks
from tests.tiers import thorough
from tests.zero.memory.process_memory_ranks import LAYERS_PER_SUB_GROUP

BLOCKS: dict[str, dict[str, Any]] = {
    "all on the CPU": {"placement": "cpu"},
    "all streamed, 3 slots": {"placement": "streamed", "num_slots": 3},
    "all three": {
        "placement": [
            {"match": ["[01].weight", "1[01].weight"], "states": "resident"},
            {"match": ["[23].weight", "[89].weight"], "states": "cpu"},
            {"match": "*", "states": "streamed"},
        ],
        "num_slots": 1,
    },
}


@cache
def trained(block: str) -> dict[str, Any]:
    """Return the answer of the process that trains the block; it is started once per worker of pytest-xdist."""
    # With these settings, memory of any size returns to the system as soon as it is freed.
    malloc_options = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_ARENA_MAX": "1"}
    (finished,) = run_ranks(1, ["-m", "tests.zero.memory.process_memory_ranks", block], timeout_s=200, **malloc_options)
    assert finished.returncode == 0, finished.output[-4000:]
    answer: dict[str, Any] = finished.answers()[0]
    return answer


# One worker of pytest-xdist runs all these tests, so that the fixture is made once.
pytestmark = pytest.mark.xdist_group("memory")


@pytest.fixture(scope="module")
def stock() -> dict[str, Any]:
    return trained("stock")


def planned(block: dict[str, Any], numels: list[int]) -> UpdatePlan:
    config = parse_config({"deep_optimizer_states": block})
    assert isinstance(config, Config)
    layers = LAYERS_PER_SUB_GROUP
    names = [[f"{layers * index + layer}.weight" for layer in range(layers)] for index in range(len(numels))]
    return config.plan(
        config.workload(
            [
                [Partition(name, numel // layers) for name in in_sub_group]
                for in_sub_group, numel in zip(names, numels, strict=True)
            ]
        )
    )


def total_bytes(reservations: Iterable[Reservation]) -> int:
    return sum(item.count * item.each_bytes for item in reservations)


@pytest.mark.parametrize("name", ["all on the CPU", thorough("all streamed, 3 slots"), thorough("all three")])
def test_the_predicted_memory_is_reserved_and_used_by_the_process(name: str, stock: dict[str, Any]) -> None:
    ours = trained(json.dumps(BLOCKS[name]))
    plan = planned(BLOCKS[name], ours["numels"])
    assert len(plan.placements) == 6
    predicted = reserved_by_the_runtime(plan, TrainingSetup(widths=Widths(param=2, grad=2, publishes=False)))
    reserved = Counter((kind, each_bytes) for kind, each_bytes in map(tuple, ours["reserved"]))
    expected: Counter[tuple[str, int]] = Counter()
    for item in predicted:
        expected[item.kind.value, item.each_bytes] += item.count
    assert reserved == +expected

    # On the CPU accelerator all reservations are host memory of exactly these sizes. They replace stock's states.
    stocks = total_bytes(reserved_by_stock(planned({"placement": "cpu"}, stock["numels"])))
    growth = total_bytes(predicted) - stocks
    assert abs(growth) >= 50e6, "the difference exceeds the noise of a process"
    assert ours["rss_bytes"] - stock["rss_bytes"] == pytest.approx(growth, abs=12e6)
    # Destroying the engine frees all of it, and buffers of DeepSpeed.
    assert ours["rss_bytes"] - ours["destroyed_rss_bytes"] >= total_bytes(predicted) - 12e6
    # While the states are created, only those of one sub-group, in the dtype of the model, are allocated temporarily.
    assert ours["peak_rss_bytes"] - ours["before_rss_bytes"] <= 1.05 * (ours["rss_bytes"] - ours["before_rss_bytes"])


def test_all_on_the_cpu_takes_14_bytes_per_parameter_and_stock_18(stock: dict[str, Any]) -> None:
    """Check the CPU accelerator. A GPU needs 16, since rounded parameters wait in host memory to be published."""
    ours = trained(json.dumps(BLOCKS["all on the CPU"]))
    numel = sum(ours["numels"])
    assert sum(each_bytes for _, each_bytes in ours["reserved"]) == 14 * numel
    assert stock["rss_bytes"] - ours["rss_bytes"] == pytest.approx(4 * numel, abs=12e6)
