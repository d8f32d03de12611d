"""Processes are forked while an engine trains; and an engine is dropped that nobody has destroyed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.launch import run_ranks

# One worker of pytest-xdist makes the fixture, once.
pytestmark = pytest.mark.xdist_group("forking")


@pytest.fixture(scope="module")
def answers() -> list[dict[str, Any]]:
    (finished,) = run_ranks(1, ["-m", "tests.zero.scripts.forking"], timeout_s=200)
    assert finished.returncode == 0, finished.output[-4000:]
    found: list[dict[str, Any]] = finished.answers()
    return found


def test_training_with_forked_processes_that_load_data_gives_stocks_bits(answers: list[dict[str, Any]]) -> None:
    assert answers[0]["differences"] == []
    assert answers[0]["pending"] == [False, True, True], "they are forked while an update goes on, too"


def test_forked_children_do_not_have_the_states_in_memory(answers: list[dict[str, Any]]) -> None:
    found = answers[0]
    states = 3 * 5
    assert found["mapped in the parent"] == [states] * 3
    assert found["mapped where data is loaded"] == [0] * 9


def test_forked_children_end_in_every_way_without_the_states(answers: list[dict[str, Any]]) -> None:
    """Their exit code is how many of the states they had, or tells of a crash."""
    for epoch in range(3):
        children = answers[0][f"children after epoch {epoch}"]
        assert children == {"after exit callbacks": 0, "multiprocessing": 0, "at once": 0}


def test_an_engine_that_is_collected_unregisters_its_memory_before_it_is_unmapped(
    answers: list[dict[str, Any]],
) -> None:
    assert answers[1] == {
        "registered": [1, []],
        "calls": ["unregistered before it is unmapped"],
        "mapped": False,
    }
