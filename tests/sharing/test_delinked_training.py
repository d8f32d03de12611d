"""Check that a delinked model continues where the shared one has ended, on any number of ranks, as with stock."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch import run_ranks
from tests.sharing.delink_ranks import CASES, SAVED_BY, STEPS
from tests.tiers import thorough
from tests.zero.training_once import on_one_worker

PROGRAM = "tests.sharing.delink_ranks"
pytestmark = on_one_worker(PROGRAM)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the delinked checkpoints, saved by 1 and by 2 ranks."""
    folder = tmp_path_factory.mktemp("delink")
    for world_size in SAVED_BY:
        run(world_size, "save", folder)
    run(1, "delink", folder)
    return folder


def run(world_size: int, part: str, folder: Path) -> list[list[dict[str, object]]]:
    """Run a part of the program on ``world_size`` ranks, and return the answers of each."""
    ranks = run_ranks(world_size, ["-m", PROGRAM, part, str(folder)], timeout_s=300)
    for finished in ranks:
        assert finished.returncode == 0, finished.output[-4000:]
    return [finished.answers() for finished in ranks]


@pytest.mark.parametrize("world_size", [1, thorough(2), thorough(3)])
@pytest.mark.promise("P1", "P4")
def test_a_delinked_model_has_the_loss_and_the_states_of_the_shared_one_and_trains_as_with_stock(
    world_size: int, checkpoints: Path
) -> None:
    for answers in run(world_size, "load", checkpoints):
        assert len(answers) == len(CASES) * len(SAVED_BY)
        for found in answers:
            assert found["problems"] == [], found
            assert found["classes"] == ["DeepSpeedZeroOptimizer_Stage3", "DeepOptimizerStates_Stage3"]
            # The training after the load goes on with the step count of the checkpoint.
            assert found["steps"] == [2 * STEPS, 2 * STEPS], found
            assert found["states"] == 3 * (3 + 4 * CASES[str(found["name"]).split(",")[0]].layers)
