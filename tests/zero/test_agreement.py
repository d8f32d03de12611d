"""All ranks run the same plan, or none runs any; nobody is left waiting."""

from __future__ import annotations

import re

from tests.launch import run_ranks


def answers(how: str) -> list[str]:
    finished = run_ranks(3, ["-m", "tests.zero.scripts.disagreeing", how], timeout_s=120)
    found = []
    for rank in finished:
        assert rank.returncode == 0, rank.output[-3000:]
        found.append(re.search(r"^ANSWER (.*)$", rank.output, re.MULTILINE).group(1))
    return found


def test_different_plans_are_an_error_that_names_the_ranks() -> None:
    for answer in answers("plans"):
        assert answer.startswith("RanksDisagree: All ranks must run the same plan")
        assert re.search(r"rank 0, 2: [0-9a-f]{16}", answer)
        assert re.search(r"rank 1: [0-9a-f]{16}", answer)


def test_a_rank_that_is_switched_off_is_named_by_every_rank() -> None:
    for answer in answers("one off"):
        assert re.search(r"RanksDisagree.* rank 1: off", answer)


def test_a_rank_that_can_make_no_plan_tells_the_others() -> None:
    first, second, third = answers("one impossible")
    assert third.startswith("ConfigError: deep_optimizer_states.placement")
    for answer in (first, second):
        assert "rank 2: failed with ConfigError: deep_optimizer_states.placement" in answer
