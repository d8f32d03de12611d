"""Check that an interrupt of a wait is no failure: what is saved and trained afterwards is bit-identical to stock."""

from __future__ import annotations

import pytest

from tests.launch import run_ranks
from tests.tiers import thorough

BLOCKS = ("cpu", "stride", "streamed", "resident", "eager")


ON = {"cpu": (), "software_gpu": ("--on", "software_gpu", "--adversary", "lazy")}


def interrupted(*arguments: str, ranks: int = 1, on: str = "cpu") -> list[dict[str, object]]:
    """Return the answers of all ranks."""
    program = ["-m", "tests.zero.failures.interrupted_ranks", *arguments, *ON[on]]
    finished = run_ranks(ranks, program, timeout_s=1800)
    for rank in finished:
        assert rank.returncode == 0, rank.output[-5000:]
    return [answer for rank in finished for answer in rank.answers()]


@pytest.mark.promise("P6")
@pytest.mark.parametrize("number", ["3", thorough("50")])
@pytest.mark.parametrize("on", ON)
def test_after_an_interrupt_at_a_random_moment_training_is_saved_and_resumed_as_with_stock(
    number: str, on: str
) -> None:
    answers = interrupted("moments", "1", number, *BLOCKS, on=on)
    assert len(answers) == int(number) * len(BLOCKS)
    assert {answer["block"] for answer in answers} == set(BLOCKS)
    assert [answer for answer in answers if answer["problem"]] == []


@pytest.mark.promise("P6")
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("block", "ranks", "on"),
    [*((block, 1, on) for block in BLOCKS for on in ON), ("stride", 2, "cpu"), ("eager", 2, "cpu")],
)
def test_each_wait_of_the_host_can_be_interrupted_and_repeated(block: str, ranks: int, on: str) -> None:
    """Check an interrupt of all ranks in the same wait, which is a collective if there are several ranks."""
    answers = interrupted("waits", block, ranks=ranks, on=on)
    assert len(answers) > 100
    assert all(answer["waits"] for answer in answers)
    assert [answer for answer in answers if answer["problem"]] == []
