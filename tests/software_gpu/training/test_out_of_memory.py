"""Check that training goes on as with stock after an allocation on the device has failed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.zero.training_once import ProgramRanks, TrainingOnce, on_one_worker

RANKS = ProgramRanks("tests.software_gpu.training.out_of_memory_ranks", timeout_s=300)
# ``filled_gpu/test_growing_values.py`` trains on after an allocation that has failed, too.
pytestmark = [on_one_worker(RANKS.program), pytest.mark.thorough]


@pytest.fixture
def answers(trained: TrainingOnce) -> list[dict[str, Any]]:
    """Return the answers of the phases."""
    return trained.answers(1)[0]


@pytest.mark.parametrize("position", range(3), ids=("forward", "backward", "step"))
def test_a_step_that_runs_out_of_device_memory_leaves_what_stock_leaves(
    position: int, answers: list[dict[str, Any]]
) -> None:
    """Check that an error in forward or backward is the caller's to handle, and that ``step()`` needs no memory."""
    answer = answers[position]
    error = "" if answer["phase"] == "step" else "OutOfMemoryError"
    assert answer["errors"] == [error, error]
    assert answer["pending"], "no update was in flight when the step began"
    assert answer["differences after the error"] == []
    assert answer["differences after the checkpoint was loaded"] == []
