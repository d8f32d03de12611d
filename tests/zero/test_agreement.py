"""All ranks run the same plan, or none runs any; nobody is left waiting."""

from __future__ import annotations

import re

import pytest

from tests.launch import run_ranks
from tests.tiers import thorough


def answers(how: str) -> list[str]:
    finished = run_ranks(3, ["-m", "tests.zero.scripts.disagreeing", how], timeout_s=120)
    found = []
    for rank in finished:
        assert rank.returncode == 0, rank.output[-3000:]
        found.extend(rank.answers())
    return found


def test_different_plans_are_an_error_that_names_the_ranks() -> None:
    for answer in answers("plans"):
        assert answer.startswith("RanksDisagree: All ranks must run the same plan")
        assert re.search(r"rank 0, 2: [0-9a-f]{16}", answer)
        assert re.search(r"rank 1: [0-9a-f]{16}", answer)


@pytest.mark.parametrize("how", ["one off", thorough("one disabled")])
def test_a_rank_on_which_it_is_off_is_named_by_every_rank(how: str) -> None:
    for answer in answers(how):
        assert re.search(r"RanksDisagree.* rank 0, 2: on / .* rank 1: off", answer)


@pytest.mark.thorough
def test_it_does_not_matter_why_it_is_off() -> None:
    assert answers("off for one, disabled for all") == ["trains with DeepSpeedZeroOptimizer_Stage3"] * 3


@pytest.mark.thorough
def test_a_rank_that_refuses_tells_the_others() -> None:
    first, second, third = answers("one refused")
    assert third == "Unsupported: this rank has another accelerator"
    for answer in (first, second):
        assert "rank 2: failed with Unsupported: this rank has another accelerator" in answer


@pytest.mark.thorough
def test_a_rank_that_can_make_no_plan_tells_the_others() -> None:
    first, second, third = answers("one impossible")
    assert third.startswith("ConfigError: deep_optimizer_states.placement")
    for answer in (first, second):
        assert "rank 2: failed with ConfigError: deep_optimizer_states.placement" in answer
