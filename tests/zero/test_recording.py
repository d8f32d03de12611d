"""The whole engine on the recording accelerator: nothing is unordered, and each piece of missing order is found."""

from __future__ import annotations

from typing import Any

import pytest

from tests.launch import run_ranks
from tests.tiers import thorough
from tests.zero.recording.faults import FAULTS
from tests.zero.recording.recorder import COMMUNICATION, DEFAULT_STREAM

WORLD_SIZES = (1, 2)


def answers(world_size: int, *what: str) -> list[dict[str, Any]]:
    finished, *_ = ranks = run_ranks(world_size, ["-m", "tests.zero.scripts.recorded", *what], timeout_s=300)
    for rank, its in enumerate(ranks):
        assert its.returncode == 0, f"rank {rank}:\n{its.output[-5000:]}"
    return finished.answers()


def assert_in_order(results: list[dict[str, Any]], world_size: int) -> None:
    for result in results:
        what = f"{result['case']}, {result['block']}"
        assert result["findings"] == [[]] * world_size, what
        assert result["differences"] == [[]] * world_size, what
        assert {DEFAULT_STREAM, "host MainThread"} < set(result["lanes"]), what
        assert world_size == 1 or COMMUNICATION in result["lanes"], what


@pytest.mark.parametrize("world_size", [thorough(1), 2])
def test_every_access_of_the_engine_is_ordered_and_the_bits_are_stocks(world_size: int) -> None:
    results = answers(world_size, "cases")
    (stock,) = (result for result in results if "stock after a write" in result)
    results.remove(stock)
    assert_in_order(results, world_size)
    assert len(results) >= {1: 28, 2: 14}[world_size]
    lanes = {lane for result in results for lane in result["lanes"]}
    # The missing order of stock DeepSpeed, which the plugin adds (``zero/gathers.py``). One rank waits in each gather.
    assert bool(stock["stock after a write"]) == (world_size > 1)
    # DeepSpeed's for gathering and for reducing, ours for each direction and for the update.
    assert {f"stream {number}" for number in range(1, 6)} | {"host deep_opt_states-cpu-lane"} < lanes


@pytest.mark.parametrize("world_size", [thorough(1), 2])
def test_random_cases(world_size: int) -> None:
    results = answers(world_size, "1", "2", "3", "4")
    assert len(results) == 4
    assert_in_order(results, world_size)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_fault_of_each_kind_is_found(world_size: int) -> None:
    found = {result["fault"]: result["shown"] for result in answers(world_size, "faults")}
    assert found.keys() == {fault.name for fault in FAULTS if fault.world_size == world_size}
    assert [name for name, shown in found.items() if not shown] == []
