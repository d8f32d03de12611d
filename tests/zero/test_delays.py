"""A rank's or a worker's timing changes neither a bit nor the order of collectives."""

from __future__ import annotations

import pytest

from tests.launch import run_ranks
from tests.tiers import thorough

SEEDS = [1, 2, 3]


@pytest.mark.parametrize("world_size", [thorough(1), thorough(2), thorough(3), 4])
def test_delays_change_nothing(world_size: int) -> None:
    ranks = run_ranks(world_size, ["-m", "tests.zero.scripts.delayed", *map(str, SEEDS)], timeout_s=120)
    for finished in ranks:
        assert finished.returncode == 0, finished.output[-4000:]
        answers = finished.answers()
        if world_size == 1:
            assert not answers.pop()["naive is the same"], "a rule that goes by the worker's timing was not seen"
        assert [answer["seed"] for answer in answers] == SEEDS
        for answer in answers:
            assert answer["differences"] == []
            # With the last seed a rank now and then waits for the end of its own, after the step.
            least = 2 if answer["seed"] == SEEDS[-1] else 4
            assert answer["deferred"] >= least, "no update went on in a forward"
            assert answer["same"], "ranks called different collectives"
            assert answer["same for every seed"], "the collectives depend on timing"
            assert answer["collectives"] > 100 or world_size == 1
            # Forward gathers ahead over sub-groups' borders, and not what the host could have to wait for.
            assert answer["ahead"] >= 10
            assert answer["stopped"] >= 10
