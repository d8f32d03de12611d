"""Check that stock and the plugin read each other's checkpoints, and that a load keeps every tensor in its place."""

from __future__ import annotations

import pytest

from tests.zero.training_once import ProgramRanks, TrainingOnce, on_one_worker

JOBS = (
    "save, 1 rank",
    "save, 2 ranks",
    "tags",
    "latest is written last",
    "asynchronous writer",
    "convert",
    "resume",
    "missing moments",
    "another set of rules",
    "universal, 1 to 2 ranks",
    "universal, 2 to 1 ranks",
    "universal, 2 to 4 ranks",
    "universal, without optimizer states",
)
"""Each job is a function of ``checkpoint_jobs.py`` that asserts its result."""

RANKS = ProgramRanks("tests.zero.checkpoints.checkpoint_jobs", timeout_s=400, arguments=lambda folder: [str(folder)])
pytestmark = on_one_worker(RANKS.program)


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.promise("P4")
def test_checkpoints_are_saved_converted_and_loaded_as_with_stock(job: str, trained: TrainingOnce) -> None:
    (answers,) = trained.answers_by_name(1, key="job")
    assert answers.keys() == set(JOBS)
    assert not answers[job]["problem"], answers[job]["problem"][-4000:]
