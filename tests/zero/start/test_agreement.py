"""Check that all ranks run the same plan or none runs any, and that no rank waits for another forever."""

from __future__ import annotations

import re

import pytest

from tests.launch import run_ranks
from tests.tiers import thorough


def answers(difference: str) -> list[str]:
    finished = run_ranks(3, ["-m", "tests.zero.start.disagreeing_ranks", difference], timeout_s=120)
    found = []
    for rank in finished:
        assert rank.returncode == 0, rank.output[-3000:]
        found.extend(rank.answers())
    return found


@pytest.mark.promise("P6")
def test_different_plans_are_an_error_that_names_the_ranks() -> None:
    for answer in answers("plans"):
        assert answer.startswith("RanksDisagree: All ranks must run the same plan")
        assert re.search(r"rank 0, 2: [0-9a-f]{16}", answer)
        assert re.search(r"rank 1: [0-9a-f]{16}", answer)


@pytest.mark.parametrize("difference", ["one off", thorough("one disabled")])
def test_every_rank_names_the_rank_on_which_the_plugin_is_off(difference: str) -> None:
    for answer in answers(difference):
        assert re.search(r"RanksDisagree.* rank 0, 2: on / .* rank 1: off", answer)


@pytest.mark.thorough
def test_ranks_on_which_it_is_off_for_different_reasons_agree() -> None:
    assert answers("off for one, disabled for all") == ["trains with DeepSpeedZeroOptimizer_Stage3"] * 3


@pytest.mark.thorough
def test_the_refusal_of_one_rank_is_reported_by_the_others() -> None:
    first, second, third = answers("one refused")
    assert third == "Unsupported: this rank has another accelerator"
    for answer in (first, second):
        assert "another one has failed / " in answer
        assert "rank 2: Unsupported: this rank has another accelerator" in answer


@pytest.mark.promise("P6")
@pytest.mark.parametrize("difference", ["one without a kernel", thorough("one without a budget")])
def test_a_rank_that_cannot_run_the_plan_stops_all_ranks(difference: str) -> None:
    first, second, third = answers(difference)
    assert third == "Unsupported: this rank has another accelerator"
    for answer in (first, second):
        assert "rank 2: Unsupported: this rank has another accelerator" in answer


@pytest.mark.thorough
def test_the_invalid_placement_of_one_rank_is_reported_by_the_others() -> None:
    first, second, third = answers("one impossible")
    assert third.startswith("ConfigError: deep_optimizer_states.placement")
    for answer in (first, second):
        assert "rank 2: ConfigError: deep_optimizer_states.placement" in answer
