"""Check that the whole engine has no race on the device, also where callers access states between steps."""

from __future__ import annotations

from typing import Any

import pytest

from tests.launch import run_ranks
from tests.zero.moves.move_counts import KINDS

WORLD_SIZES = (1, 2)


def answers(world_size: int, *arguments: str) -> list[dict[str, Any]]:
    first, *_ = ranks = run_ranks(world_size, ["-m", "tests.software_gpu.races.race_ranks", *arguments], timeout_s=600)
    for rank, process in enumerate(ranks):
        assert process.returncode == 0, f"rank {rank}:\n{process.output[-5000:]}"
    return first.answers()


def assert_in_order(results: list[dict[str, Any]], world_size: int) -> None:
    for result in results:
        label = f"{result['case']}, {result['block']}"
        assert result["races"] == [[]] * world_size, label
        assert result["differences"] == [[]] * world_size, label


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
    assert set(moves["moved"]["kinds"]) == KINDS, "every kind of move is checked"
    assert min(moves["moved"][name] for name in ("recut_plans", "evictions", "restorations")) > 0
    assert_in_order(results, world_size)
    assert len(results) >= least
    # Stock's gathers do not wait for the caller's writes; the plugin adds the wait (``zero/step/gathers.py``). With one
    # rank, each gather waits anyway.
    assert bool(stock["stock after a write"]) == (world_size > 1)


@pytest.mark.thorough
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_random_cases_have_no_race_and_the_bits_of_stock(world_size: int) -> None:
    seeds = "1234"
    results = answers(world_size, *seeds)
    assert len(results) == len(seeds)
    assert_in_order(results, world_size)
