"""Check the warning and the refusals for an untested release of DeepSpeed, by faking the installed version."""

from __future__ import annotations

import pytest

from tests.zero.training_once import ProgramRanks, TrainingOnce, on_one_worker

RANKS = ProgramRanks("tests.zero.start.untested_release_ranks", timeout_s=120, fresh=(1,))
PLUGIN = "DeepOptimizerStates_Stage3"
pytestmark = [on_one_worker(RANKS.program), pytest.mark.promise("P6")]

MISSING = {
    "private name": "Engine._hook is missing",
    "attribute": "'DeepSpeedZeroConfig' object has no attribute 'gone'",
    "module": "import of deepspeed.runtime.zero.offload_config",
}


def test_a_release_with_all_names_is_used_with_one_warning(trained: TrainingOnce) -> None:
    (answers,) = trained.answers_by_name(1)
    for name in ("all names", "all names, again", "another release"):
        assert answers[name]["found"] == PLUGIN
    output = trained.finished(1)[0].output
    assert output.count("DeepSpeed 0.20.0 was not tested with deep_opt_states") == 1
    assert output.count("DeepSpeed 0.21.0 was not tested with deep_opt_states") == 1


@pytest.mark.parametrize("name", MISSING)
def test_a_release_that_lacks_a_name_is_refused_with_that_name(name: str, trained: TrainingOnce) -> None:
    (answers,) = trained.answers_by_name(1)
    rule, missing, remedy = answers[name]["found"].splitlines()
    assert rule.endswith(", an untested release that lacks")
    assert MISSING[name] in missing
    assert remedy == "Install one that was tested: pip install deepspeed==0.19.8."


def test_every_rank_raises_if_one_refuses_and_none_waits_for_a_rank_that_has_read_a_config(
    trained: TrainingOnce,
) -> None:
    first, second = trained.answers_by_name(2)
    assert first["accepted"]["found"] == second["accepted"]["found"] == PLUGIN
    assert "rank 1: " in first["refused on rank 1"]["found"]
    assert "an untested release that lacks\n  gone\n" in second["refused on rank 1"]["found"]
