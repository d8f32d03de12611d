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

OF_BF16_MASTERS = (
    *("save, 1 rank", "save, 2 ranks", "convert", "resume"),
    *("universal, 1 to 2 ranks", "universal, 2 to 1 ranks"),
)
JOBS_WITH = {
    "fp32": JOBS,
    "bf16-masters": OF_BF16_MASTERS,
    "bf16": (*OF_BF16_MASTERS, "tags"),
    "disk": tuple(job for job in OF_BF16_MASTERS if job != "resume"),
}
"""The jobs by the dtypes of the states, and those with states on disk."""

PROGRAM = "tests.zero.checkpoints.checkpoint_jobs"


def ranks_with(states: str) -> ProgramRanks:
    return ProgramRanks(PROGRAM, timeout_s=400, arguments=lambda folder: [str(folder), states])


SELECTIONS = {states: ranks_with(states) for states in JOBS_WITH}


@pytest.mark.parametrize(
    ("states", "job"),
    [
        pytest.param(states, job, marks=on_one_worker(f"{PROGRAM} {states}"))
        for states, jobs in JOBS_WITH.items()
        for job in jobs
    ],
)
@pytest.mark.promise("P4")
def test_checkpoints_are_saved_converted_and_loaded_as_with_stock(
    states: str, job: str, trained_by_selection: dict[str, TrainingOnce]
) -> None:
    (answers,) = trained_by_selection[states].answers_by_name(1, key="job")
    assert answers.keys() == set(JOBS_WITH[states])
    assert not answers[job]["problem"], answers[job]["problem"][-4000:]
