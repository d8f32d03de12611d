"""Check that any sequence of calls between updates sees the same as with stock."""

from __future__ import annotations

import pytest

from tests.launch import run_ranks


@pytest.mark.parametrize(
    ("world_size", "seeds"), [(1, range(2)), (2, range(2, 4)), pytest.param(2, range(4, 6), marks=pytest.mark.thorough)]
)
def test_random_sequences_of_calls_see_the_bits_of_stock(world_size: int, seeds: range) -> None:
    arguments = [*map(str, seeds), *(["naive"] if world_size == 1 else [])]
    for finished in run_ranks(world_size, ["-m", "tests.zero.behaviour.sequence_ranks", *arguments], timeout_s=200):
        assert finished.returncode == 0, finished.output[-4000:]
        answers = finished.answers()
        found = [answer for answer in answers if "seed" in answer]
        assert [answer["seed"] for answer in found] == list(seeds)
        for answer in found:
            assert answer["differences"] == [], answer
        assert sum(answer["pending"] for answer in found) > 5 * len(seeds), "too few calls while an update was pending"
        for answer in (answer for answer in answers if "naive" in answer):
            assert answer["noticed"], answer["naive"]
        assert len(answers) == len(seeds) + (4 if world_size == 1 else 0)
