"""Check that units which move between steps, and between checkpoints, leave the bits of stock."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.tiers import thorough
from tests.zero.moves.cases import ACCESSED, CASES, MOVED_OFTEN
from tests.zero.moves.move_counts import KINDS, assert_many_moves, total
from tests.zero.moves.naive_moves import NAIVE
from tests.zero.training_once import ProgramRanks, TrainingOnce, on_one_worker

# As in the parity tests, several ranks hash strings differently.
RANKS = ProgramRanks(
    "tests.zero.moves.move_ranks", timeout_s=400, arguments=lambda folder: [str(folder / "results")], fresh=(2, 3)
)
WORLD_SIZES = {case.name: case.world_size for case in (*CASES, *MOVED_OFTEN, *ACCESSED)}


def results_of(world_size: int, trained: TrainingOnce) -> list[dict[str, Any]]:
    """Return the results of all cases of a world size, of every rank."""
    trained.finished(world_size)
    return [json.loads((trained.folder(world_size) / f"results.{rank}").read_text()) for rank in range(world_size)]


def result_of(name: str, by_name: dict[str, Any]) -> dict[str, Any]:
    assert name in by_name, "an earlier case failed"
    result: dict[str, Any] = by_name[name]
    assert "error" not in result, result["error"]
    return result


def grouped(name: str, world_size: int) -> Any:
    """Return a test parameter such that one worker of pytest-xdist runs all cases of a world size."""
    group = on_one_worker(RANKS.program, world_size)
    return thorough(name, group) if world_size > 1 else pytest.param(name, id=name, marks=group)


@pytest.mark.promise("P1", "P2", "P4")
@pytest.mark.parametrize("name", [grouped(name, world_size) for name, world_size in WORLD_SIZES.items()])
def test_units_that_move_between_steps_leave_the_bits_of_stock(name: str, trained: TrainingOnce) -> None:
    for rank, by_name in enumerate(results_of(WORLD_SIZES[name], trained)):
        result = result_of(name, by_name)
        for variant, found in result["differences"].items():
            assert found == [], f"rank {rank}, {variant}"
        assert set(result["moved"]["kinds"]) == KINDS, "every kind of move happens"


@pytest.mark.parametrize(
    "world_size",
    [
        pytest.param(1, marks=on_one_worker(RANKS.program, 1)),
        thorough(2, on_one_worker(RANKS.program, 2)),
        thorough(3, on_one_worker(RANKS.program, 3)),
    ],
)
def test_a_thousand_units_move_at_each_number_of_ranks(world_size: int, trained: TrainingOnce) -> None:
    for by_name in results_of(world_size, trained):
        assert_many_moves(total(result["moved"] for result in by_name.values() if "moved" in result))


@pytest.mark.parametrize("name", [grouped(name, 1) for name in NAIVE])
def test_every_naive_way_to_move_changes_bits(name: str, trained: TrainingOnce) -> None:
    (by_name,) = results_of(1, trained)
    assert result_of(name, by_name)["shown"]
