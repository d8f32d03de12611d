"""Check forks while an engine trains, and the garbage collection of an engine that was not destroyed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.zero.training_once import ProgramRanks, TrainingOnce, on_one_worker

RANKS = ProgramRanks("tests.zero.failures.forking_ranks", timeout_s=200)
pytestmark = on_one_worker(RANKS.program)


@pytest.fixture
def answers(trained: TrainingOnce) -> list[dict[str, Any]]:
    """Return the answers of the training and of the garbage collection."""
    return trained.answers(1)[0]


@pytest.mark.promise("P1")
def test_training_with_forked_data_loaders_has_the_bits_of_stock(answers: list[dict[str, Any]]) -> None:
    assert answers[0]["differences"] == []
    assert answers[0]["pending"] == [False, True, True], "the later epochs must fork while an update is in flight"


def test_forked_children_do_not_have_the_states_in_memory(answers: list[dict[str, Any]]) -> None:
    found = answers[0]
    states = 3 * 5
    assert found["mapped in the parent"] == [states] * 3
    assert found["mapped where data is loaded"] == [0] * 9


def test_forked_children_end_in_every_way_without_the_states(answers: list[dict[str, Any]]) -> None:
    """Check the exit codes: the number of states that the child could read, or the code of a crash."""
    for epoch in range(3):
        children = answers[0][f"children after epoch {epoch}"]
        assert children == {"after exit callbacks": 0, "multiprocessing": 0, "at once": 0}


def test_a_garbage_collected_engine_unregisters_its_memory_before_it_is_unmapped(
    answers: list[dict[str, Any]],
) -> None:
    assert answers[1] == {
        "registered": [1, []],
        "calls": ["unregistered before it is unmapped"],
        "mapped": False,
    }
