"""Check that the whole engine has no race on the recording accelerator, and that every seeded fault is found."""

from __future__ import annotations

from typing import Any

import pytest

from tests.launch import run_ranks
from tests.zero.moves.move_counts import KINDS
from tests.zero.race_detector.detector import COMMUNICATION, DEFAULT_STREAM
from tests.zero.races.faults import FAULTS

WORLD_SIZES = (1, 2)


def answers(world_size: int, *arguments: str) -> list[dict[str, Any]]:
    first, *_ = ranks = run_ranks(world_size, ["-m", "tests.zero.races.engine_race_ranks", *arguments], timeout_s=600)
    for rank, process in enumerate(ranks):
        assert process.returncode == 0, f"rank {rank}:\n{process.output[-5000:]}"
    return first.answers()


def assert_in_order(results: list[dict[str, Any]], world_size: int) -> None:
    for result in results:
        label = f"{result['case']}, {result['block']}"
        assert result["findings"] == [[]] * world_size, label
        assert result["differences"] == [[]] * world_size, label
        assert {DEFAULT_STREAM, "host MainThread"} < set(result["lanes"]), label
        assert world_size == 1 or COMMUNICATION in result["lanes"], label


@pytest.mark.promise("P1")
@pytest.mark.parametrize(
    ("world_size", "cases", "least"),
    [
        pytest.param(1, "cases", 28, marks=pytest.mark.thorough),
        pytest.param(2, "cases", 32, marks=pytest.mark.thorough),
        (2, "quick", 22),
    ],
)
def test_every_access_of_the_engine_is_ordered_and_the_bits_are_those_of_stock(
    world_size: int, cases: str, least: int
) -> None:
    results = answers(world_size, cases)
    (stock,) = (result for result in results if "stock after a write" in result)
    results.remove(stock)
    (moves,) = (result for result in results if "moved" in result)
    results.remove(moves)
    assert set(moves["moved"]["kinds"]) == KINDS, "every kind of move is recorded"
    assert min(moves["moved"][name] for name in ("recut_plans", "evictions", "restorations")) > 0
    assert_in_order(results, world_size)
    assert len(results) >= least
    lanes = {lane for result in results for lane in result["lanes"]}
    # Stock's gathers do not wait for the caller's writes; the plugin adds the wait (``zero/step/gathers.py``). With one
    # rank, each gather waits anyway.
    assert bool(stock["stock after a write"]) == (world_size > 1)
    # DeepSpeed has a stream for gathers and one for reductions; we have one per direction and one for the update.
    assert {f"stream {number}" for number in range(1, 6)} | {"host deep_opt_states-cpu-lane"} < lanes


@pytest.mark.thorough
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_random_cases_have_no_race_and_the_bits_of_stock(world_size: int) -> None:
    seeds = "1234"
    results = answers(world_size, *seeds)
    assert len(results) == len(seeds)
    assert_in_order(results, world_size)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_seeded_fault_is_found(world_size: int) -> None:
    found = {result["fault"]: result["shown"] for result in answers(world_size, "faults")}
    assert found.keys() == {fault.name for fault in FAULTS if fault.world_size == world_size}
    assert [name for name, shown in found.items() if not shown] == []
