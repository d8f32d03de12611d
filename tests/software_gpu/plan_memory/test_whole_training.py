"""Check that training as a whole takes as much memory of the GPU as predicted, with stock and with plans."""

from __future__ import annotations

import pytest

from tests.launch import run_ranks
from tests.software_gpu.plan_memory.whole_training_ranks import TRAININGS
from tests.tiers import thorough

PROGRAM = "tests.software_gpu.plan_memory.whole_training_ranks"

TOLERANCE = 0.05

SHORT = ("stock", "stock, activations are kept", "streamed")
LONG = tuple(name for name in TRAININGS if name not in SHORT)
RANKS = {"1 rank, short": (1, SHORT), "1 rank": (1, LONG), "2 ranks": (2, tuple(TRAININGS))}
"""The numbers of ranks, and what they train."""


@pytest.mark.promise("P5")
@pytest.mark.parametrize("ranks", ["1 rank, short", thorough("1 rank"), thorough("2 ranks")])
def test_training_takes_the_predicted_memory_of_the_gpu(ranks: str) -> None:
    world_size, trainings = RANKS[ranks]
    for rank, finished in enumerate(run_ranks(world_size, ["-m", PROGRAM, *trainings], timeout_s=900)):
        assert finished.returncode == 0, f"rank {rank}:\n{finished.output[-4000:]}"
        answers = finished.answers()
        assert [answer["name"] for answer in answers] == list(trainings)
        errors = {answer["name"]: answer["predicted"] / answer["allocated"] - 1 for answer in answers}
        assert all(abs(error) <= TOLERANCE for error in errors.values()), errors
