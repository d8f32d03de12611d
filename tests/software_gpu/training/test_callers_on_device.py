"""Check that callers of DeepSpeed see the same values on the device as with stock, by the programs of ``zero/``.

Both arms train on the device. Nothing is executed before it is waited for, so that a missing wait shows.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.launch import Finished, run_ranks
from tests.zero.behaviour.test_behaviour import MODULES, SCENARIOS

LAZY = ["--on", "software_gpu", "--adversary", "lazy"]

CHOSEN = (
    "states.nested_contexts",
    "states.partitions_that_the_caller_replaces",
    "steps.learning_rates",
    "assigned.assigned_states",
    "assigned.second_engines",
)
"""The scenarios of ``make test``. In the first, the next forward must wait for the caller's writes."""


def run(world_size: int, program: str, *arguments: str) -> list[Finished]:
    """Run a program of ``tests/zero/behaviour`` on the device, and return the ranks, which must succeed."""
    ranks = run_ranks(world_size, ["-m", f"tests.zero.behaviour.{program}", *LAZY, *arguments], timeout_s=900)
    for rank, finished in enumerate(ranks):
        assert finished.returncode == 0, f"rank {rank}:\n{finished.output[-5000:]}"
    return ranks


@pytest.mark.promise("P1")
@pytest.mark.parametrize(
    ("world_size", "chosen"),
    [
        (2, CHOSEN),
        pytest.param(1, MODULES, marks=pytest.mark.thorough),
        pytest.param(2, MODULES, marks=pytest.mark.thorough),
    ],
)
def test_callers_see_the_same_values_on_the_device_as_with_stock(world_size: int, chosen: Sequence[str]) -> None:
    for rank, finished in enumerate(run(world_size, "behaviour_ranks", *chosen)):
        answers = finished.answers()
        names = SCENARIOS if chosen is MODULES else [name.rpartition(".")[2] for name in chosen]
        assert [answer["name"] for answer in answers] == list(names)
        for answer in answers:
            assert answer["differences"] == [], f"rank {rank}, {answer['name']}"
            assert answer["seen"] > 3


def test_readers_and_writers_of_states_see_the_same_values_on_the_same_devices_as_with_stock() -> None:
    for finished in run(2, "reader_ranks"):
        assert "all readers agree" in finished.output


@pytest.mark.thorough
def test_parameters_are_read_and_changed_right_after_a_step_on_the_device_as_with_stock() -> None:
    (finished,) = run(1, "right_after_step_ranks")
    assert "equal right after step" in finished.output


@pytest.mark.promise("P1")
@pytest.mark.parametrize(
    ("world_size", "seeds"),
    [
        (1, (0,)),
        pytest.param(1, range(1, 9), marks=pytest.mark.thorough),
        pytest.param(2, range(2, 8), marks=pytest.mark.thorough),
    ],
)
def test_random_sequences_of_calls_on_the_device_see_the_bits_of_stock(world_size: int, seeds: Sequence[int]) -> None:
    for finished in run(world_size, "sequence_ranks", *map(str, seeds)):
        answers = finished.answers()
        assert [answer["seed"] for answer in answers] == list(seeds)
        for answer in answers:
            assert answer["differences"] == [], answer
        pending = sum(answer["pending"] for answer in answers)
        assert pending > 5 * len(seeds), "too few calls while an update was pending"
