"""Check that a plan takes as much memory of the GPU as predicted, with gradients only where they are counted."""

from __future__ import annotations

from typing import Any

import pytest

from tests.launch import run_ranks
from tests.software_gpu.plan_memory.plan_memory_ranks import TRAININGS
from tests.tiers import thorough

PROGRAM = "tests.software_gpu.plan_memory.plan_memory_ranks"

TOLERANCE = 0.05

SHORT = ("few plans", "only sums")
LONG = tuple(name for name in TRAININGS if name not in SHORT)
GROUPS = tuple(tuple(TRAININGS)[begin : begin + 3] for begin in range(0, len(TRAININGS), 3))
"""All trainings in groups of three. The host memory of a process grows with each engine of stock that it has trained
and destroyed: two processes with all trainings take 21 GB."""
RANKS = {
    "1 rank, short": (1, SHORT),
    "1 rank": (1, LONG),
    **{f"2 ranks, {group[0]} to {group[-1]}": (2, group) for group in GROUPS},
}
"""The numbers of ranks, and what they train."""


def assert_as_predicted(training: str, answer: dict[str, Any]) -> None:
    assert answer["differences"] == []
    for plan in answer["plans"]:
        where = f"{training}, {plan['plan']}"
        predicted = plan["predicted"]
        for name in ("given_back", "taken_again"):
            assert abs(plan[name] - predicted) <= TOLERANCE * predicted, f"{where}: {name} {plan[name]} of {predicted}"
        predicted = plan["predicted_with_staging"]
        assert abs(plan["allocated"] - predicted) <= TOLERANCE * predicted, f"{where}: {plan['allocated']}"
        assert plan["held"] in (None, plan["predicted"]), where
        assert_gradients(TRAININGS[training].setup_with(plan["plan"]), plan, where)


def assert_gradients(setup: Any, plan: dict[str, Any], where: str) -> None:
    """Check that the gradients on the GPU are those of streamed and resident units, and of others only if counted."""
    expected = dict(plan["gradients_of_units"])
    if not (setup.accumulates and setup.sums_on_accelerator):
        expected["cpu"] = 0
    assert plan["gradients"] == expected, where


@pytest.mark.promise("P5")
@pytest.mark.parametrize("ranks", ["1 rank, short", *(thorough(name) for name in list(RANKS)[1:])])
def test_each_plan_takes_the_predicted_memory_of_the_gpu(ranks: str) -> None:
    world_size, trainings = RANKS[ranks]
    for rank, finished in enumerate(run_ranks(world_size, ["-m", PROGRAM, *trainings], timeout_s=900)):
        assert finished.returncode == 0, f"rank {rank}:\n{finished.output[-4000:]}"
        answers = finished.answers()
        assert [answer["name"] for answer in answers] == list(trainings)
        for answer in answers:
            assert_as_predicted(answer["name"], answer)
