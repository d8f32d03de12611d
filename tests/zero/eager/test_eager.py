"""Check updates that start in backward: what comes between backward and ``step()`` sees, and gives, stock's bits."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from deep_opt_states.zero.step.eager import LAST_STEPS
from tests.launch import run_ranks
from tests.tiers import thorough
from tests.zero.eager import between_ranks
from tests.zero.eager.between_ranks import BLOCKS, KEEPING, PARTLY_KEEPING, VOIDING
from tests.zero.eager.orders_ranks import ORDERS
from tests.zero.eager.pause_ranks import CLIPPED, SKIPPED, STEPS


@pytest.mark.promise("P1")
@pytest.mark.parametrize("world_size", [thorough(1), 2])
def test_calls_between_backward_and_step_see_and_give_the_bits_of_stock(world_size: int) -> None:
    for finished in run_ranks(world_size, ["-m", between_ranks.__name__], timeout_s=300):
        assert finished.returncode == 0, finished.output[-4000:]
        answers = finished.answers()
        assert len(answers) == 2 * len(BLOCKS)
        for answer in answers:
            assert answer["differences"] == [], answer["block"]
            if not answer["waits"]:
                continue
            for call in KEEPING:
                speculated, kept, void = answer["speculated"][call.__name__]
                assert kept == speculated > 1, call
                assert void == 0, call
            for call in PARTLY_KEEPING:
                speculated, kept, void = answer["speculated"][call.__name__]
                assert 0 < kept < speculated, call
                assert kept + void == speculated, call
            for call in VOIDING:
                speculated, kept, void = answer["speculated"][call.__name__]
                assert kept == 0, call
                assert void >= speculated > 1, call


WHY = "steps were clipped, skipped or changed after backward"


@pytest.mark.parametrize("world_size", [thorough(1), 2])
def test_updates_in_backward_pause_while_many_steps_are_clipped_or_skipped(world_size: int) -> None:
    last = CLIPPED[-1]
    # The skipped step was the first of them.
    again = SKIPPED + LAST_STEPS
    for finished in run_ranks(world_size, ["-m", "tests.zero.eager.pause_ranks"], timeout_s=120):
        assert finished.returncode == 0, finished.output[-4000:]
        (answer,) = finished.answers()
        assert answer["differences"] == []
        assert answer["lines"] == [
            [last, f"updates in backward stop: 6 of the last 10 {WHY}"],
            [again, f"updates in backward start again: 5 of the last 20 {WHY}"],
        ]
        is_speculated = [number > 0 for number in answer["speculated"]]
        assert is_speculated == [step <= last or step > again for step in range(STEPS)]


@pytest.mark.promise("P4")
def test_ranks_that_are_killed_between_speculation_and_commit_resume_from_the_last_checkpoint(tmp_path: Path) -> None:
    program = ["-m", "tests.zero.eager.killed_ranks", str(tmp_path)]
    for moment in ("speculated", "commit"):
        codes = [finished.returncode for finished in run_ranks(2, [*program, moment], timeout_s=60)]
        assert codes == [-signal.SIGKILL] * 2
    for finished in run_ranks(2, [*program, "resume"], timeout_s=120):
        assert finished.returncode == 0, finished.output[-4000:]
        answers = finished.answers()
        assert len(answers) == 4
        for answer in answers:
            assert answer["differences"] == [], answer


@pytest.mark.promise("P1")
def test_no_order_of_calls_commits_a_step_of_old_gradients_or_of_an_old_learning_rate() -> None:
    (finished,) = run_ranks(1, ["-m", "tests.zero.eager.orders_ranks"], timeout_s=120)
    assert finished.returncode == 0, finished.output[-4000:]
    answers = finished.answers()
    assert len(answers) == len(ORDERS)
    for found in answers:
        assert found["are_equal"], found["order"]
        assert found["void"] > 0, found["order"]
