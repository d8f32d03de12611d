"""Check that the whole engine has no race on the device, also where callers access states between steps."""

from __future__ import annotations

import pytest

from tests.launch import run_ranks
from tests.zero.random_plans import KINDS


@pytest.mark.P1
@pytest.mark.parametrize(
    ("world_size", "cases", "least"),
    [
        pytest.param(1, "cases", 28, marks=pytest.mark.thorough),
        pytest.param(2, "cases", 28, marks=pytest.mark.thorough),
        (2, "quick", 20),
    ],
)
def test_every_access_of_the_engine_is_ordered_and_the_bits_are_those_of_stock(
    world_size: int, cases: str, least: int
) -> None:
    ranks = run_ranks(world_size, ["-m", "tests.software_gpu.races.race_ranks", cases], timeout_s=600)
    for rank, process in enumerate(ranks):
        assert process.returncode == 0, f"rank {rank}:\n{process.output[-5000:]}"
    results = ranks[0].answers()
    (stock,) = (result for result in results if "stock after a write" in result)
    results.remove(stock)
    (moves,) = (result for result in results if "moved" in result)
    results.remove(moves)
    assert set(moves["moved"]["kinds"]) == KINDS, "every kind of move is checked"
    assert min(moves["moved"][name] for name in ("recut_plans", "evictions", "restorations")) > 0
    assert len(results) >= least
    for result in results:
        label = f"{result['case']}, {result['block']}"
        assert result["races"] == result["differences"] == [[]] * world_size, label
    # Stock's gathers do not wait for the caller's writes; the plugin adds the wait (``zero/step/gathers.py``). With one
    # rank, each gather waits anyway.
    assert any(stock["stock after a write"]) == (world_size > 1)
