"""Between ``step()`` and the next forward, a user who reads or writes in place sees stock's parameters."""

from __future__ import annotations

from tests.launch import run_ranks


def test_data_and_numbers_are_those_of_the_step() -> None:
    (finished,) = run_ranks(1, ["-m", "tests.zero.scripts.right_after_step"], timeout_s=120)
    assert finished.returncode == 0, finished.output[-4000:]
    assert "equal right after step" in finished.output
