"""Check that a state that no update can use is refused on every rank before anything is updated."""

from __future__ import annotations

import pytest

from tests.launch import run_ranks
from tests.zero.failures.refused_state_ranks import BAD


@pytest.mark.promise("P6")
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_state_that_cannot_be_updated_is_refused_and_the_step_can_be_repeated(world_size: int) -> None:
    ranks = run_ranks(world_size, ["-m", "tests.zero.failures.refused_state_ranks"], timeout_s=300)
    for rank, finished in enumerate(ranks):
        assert finished.returncode == 0, finished.output[-4000:]
        answers = {answer["name"]: answer for answer in finished.answers()}
        assert answers.keys() == BAD.keys()
        for name, (_, message) in BAD.items():
            assert answers[name]["differences"] == [], name
            refused = rank == world_size - 1
            expected = ("StateRefused: ", message, ".\n") if refused else ("RanksDisagree: ", "refuse: [1]")
            assert all(part in answers[name]["error"] for part in expected), (name, answers[name]["error"])
