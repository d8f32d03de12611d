"""Check that reads and writes in place between ``step()`` and the next forward see the parameters of stock."""

from __future__ import annotations

from tests.launch import run_ranks


def test_in_place_access_and_changed_hyperparameters_between_steps_have_the_bits_of_stock() -> None:
    (finished,) = run_ranks(1, ["-m", "tests.zero.behaviour.right_after_step_ranks"], timeout_s=120)
    assert finished.returncode == 0, finished.output[-4000:]
    assert "equal right after step" in finished.output
