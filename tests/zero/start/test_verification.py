"""Check the decision about a release of DeepSpeed that was never tried, by faking the version of the installed one."""

from __future__ import annotations

import pytest

from tests.launch import run_ranks
from tests.zero.training_once import ProgramRanks, TrainingOnce, on_one_worker

RANKS = ProgramRanks(
    "tests.zero.start.untested_release_ranks", timeout_s=400, arguments=lambda folder: [str(folder)], fresh=(1,)
)
PLUGIN = "DeepOptimizerStates_Stage3"
pytestmark = [on_one_worker(RANKS.program, 1), pytest.mark.promise("P6")]

REFUSED = {
    "refused by the config": '"untested_deepspeed" is "refuse"',
    "seeded difference": "master of sub-group",
    "difference cached": "master of sub-group",
    "training fails": "the tiny training did not finish\n  exit code 1",
    "trains again after a failure": "master of sub-group",
    "missing name": "Engine._hook is missing",
    "missing attribute": "it lacks a name that the plugin uses\n  'DeepSpeedZeroConfig' object has no attribute 'gone'",
    "missing attribute, refused by the config": '"untested_deepspeed" is "refuse"',
    "missing module": "it lacks a name that the plugin uses\n  import of deepspeed.runtime.superoffload",
    "prints_null": "the tiny training did not finish\n  exit code 0: null",
    "fails_at_its_end": "the tiny training did not finish\n  exit code 3",
}


@pytest.fixture
def found(trained: TrainingOnce) -> dict[str, str]:
    (answers,) = trained.answers_by_name(1)
    return {name: answer["found"] for name, answer in answers.items()}


def test_a_release_with_the_bits_of_stock_is_used_with_a_warning(trained: TrainingOnce, found: dict[str, str]) -> None:
    assert found["verified"] == PLUGIN
    assert found["cached"] == PLUGIN, "the second start must read the result of the first one"
    output = trained.finished(1)[0].output
    assert output.count("DeepSpeed 0.20.0 was never tried with this release") == 2


def test_every_rank_raises_if_one_refuses_and_none_waits_for_a_rank_that_has_read_a_config() -> None:
    answers = [
        {answer["name"]: answer["found"] for answer in finished.answers()}
        for finished in run_ranks(2, ["-m", RANKS.program], timeout_s=120)
    ]
    for answer in answers:
        assert answer["accepted"] == PLUGIN
    assert "rank 1: Unsupported: " in answers[0]["refused on rank 1"]
    assert "the tiny training differs from stock" in answers[1]["refused on rank 1"]


@pytest.mark.parametrize("name", REFUSED)
def test_another_release_is_refused_with_what_differs(name: str, found: dict[str, str]) -> None:
    assert REFUSED[name] in found[name]
    assert "must be a release that was tried (0.18.5," in found[name]
    assert "pip install deepspeed==0.19.8" in found[name]
