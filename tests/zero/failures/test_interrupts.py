"""Check that an interrupt of a wait is no failure: what is saved and trained afterwards is bit-identical to stock."""

from __future__ import annotations

import pytest

from tests.launch import run_ranks
from tests.tiers import thorough

BLOCKS = ("cpu", "stride", "streamed", "resident")


def interrupted(*arguments: str, timeout_s: float) -> list[dict[str, object]]:
    (finished,) = run_ranks(1, ["-m", "tests.zero.failures.interrupted_ranks", *arguments], timeout_s=timeout_s)
    assert finished.returncode == 0, finished.output[-5000:]
    return finished.answers()


@pytest.mark.promise("P6")
@pytest.mark.parametrize("number", ["3", thorough("50")])
def test_after_an_interrupt_at_a_random_moment_training_is_saved_and_resumed_as_with_stock(number: str) -> None:
    answers = interrupted("moments", "1", number, *BLOCKS, timeout_s=1800)
    assert len(answers) == int(number) * len(BLOCKS)
    assert {answer["block"] for answer in answers} == set(BLOCKS)
    assert [answer for answer in answers if answer["problem"]] == []


@pytest.mark.promise("P6")
@pytest.mark.thorough
@pytest.mark.parametrize("block", BLOCKS)
def test_each_wait_of_the_host_can_be_interrupted_and_repeated(block: str) -> None:
    answers = interrupted("waits", block, timeout_s=1800)
    assert len(answers) > 100
    assert all(answer["waits"] for answer in answers)
    assert [answer for answer in answers if answer["problem"]] == []
