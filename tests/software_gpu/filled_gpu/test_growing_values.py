"""Check a filled GPU when training needs more memory from one step to the next, and the inputs do not show it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.launch import run_ranks
from tests.tiers import thorough

PROGRAM = "tests.software_gpu.filled_gpu.growing_values_ranks"
BALANCED = 8
"""The steps before the growth."""


def trained(growth: str) -> tuple[dict[str, dict[str, Any]], str]:
    """Return the answers by name, and the log. Every training without a fault has stock's bits."""
    (finished,) = run_ranks(1, ["-m", PROGRAM, growth], timeout_s=600)
    assert finished.returncode == 0, finished.output[-4000:]
    answers = {answer["name"]: answer for answer in finished.answers()}
    assert (answers[growth]["error"], answers[growth]["differences"]) == ("", [])
    return answers, finished.output


def residents(answer: dict[str, Any]) -> list[int]:
    """Return the number of resident units after each step."""
    return [placed["resident"] for placed in answer["placed"]]


@pytest.mark.promise("P1", "P6")
@pytest.mark.thorough
def test_growth_within_the_margin_is_met_and_states_leave_at_the_next_border() -> None:
    answers, _ = trained("within the margin")
    answer = answers["within the margin"]
    assert not any(answer["failed"])
    # States leave at the border, the windows are measured in one step, and the plan for less memory follows.
    assert answer["evicted"] == [step == BALANCED + 1 for step in range(len(answer["evicted"]))]
    assert residents(answer)[BALANCED] > residents(answer)[BALANCED + 2]


@pytest.mark.promise("P1", "P6")
@pytest.mark.parametrize("growth", [thorough("in small steps"), thorough("from layer to layer")])
def test_growth_in_steps_of_less_than_half_of_the_margin_is_met(growth: str) -> None:
    answers, log = trained(growth)
    answer = answers[growth]
    assert not any(answer["failed"])
    in_forward = growth == "from layer to layer"
    assert sum(answer["evicted"]) == 1 + in_forward, "within a forward, the memory is given back a step earlier"
    assert residents(answer)[BALANCED - 1] > residents(answer)[-1]
    assert answers["fault"]["error"] == "OutOfMemoryError"
    assert "an allocation has failed while optimizer states hold" in log
    assert "a larger gpu_memory_margin_gb leaves more memory free" in log


@pytest.mark.promise("P1", "P6")
@pytest.mark.parametrize("growth", ["at once in forward", thorough("at once in backward")])
def test_after_growth_beyond_the_margin_the_same_batch_succeeds_with_the_bits_of_stock(growth: str) -> None:
    answers, log = trained(growth)
    answer = answers[growth]
    steps = range(len(answer["failed"]))
    assert answer["failed"] == [step == BALANCED for step in steps]
    # The windows are measured again in one step, in which the CPU updates all units.
    assert answer["evicted"] == [step in (BALANCED, BALANCED + 1) for step in steps]
    assert residents(answer)[BALANCED] > residents(answer)[BALANCED + 2]
    assert "evicted after an allocation has failed." in log
    # The second attempt fails if the memory is kept.
    assert answers["fault"]["error"] == "OutOfMemoryError"
