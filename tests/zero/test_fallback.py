"""Where our C++ kernel cannot be compiled, stock's op updates: the log says so and why, and the bits are the same."""

from __future__ import annotations

from tests.launch import run_ranks
from tests.zero.scripts.fallback import CASE


def test_stocks_op_updates_and_the_log_says_why() -> None:
    (finished,) = run_ranks(1, ["-m", "tests.zero.scripts.fallback"], timeout_s=120)
    assert finished.returncode == 0, finished.output[-4000:]
    found = finished.answers()
    assert [its["block"] for its in found] == list(CASE.blocks)
    for its in found:
        assert its["class"] == "DeepOptimizerStates_Stage3"
        assert its["differences"] == [], its["block"]
        assert its["deferred"] == 0, "it cannot update a part of a sub-group"

    lines = finished.output.splitlines()
    starts = [at for at, line in enumerate(lines) if "The C++ Adam kernel cannot be compiled" in line]
    assert len(starts) == len(CASE.blocks), "once an engine"
    for at in starts:
        reason, remedy, fallback = lines[at : at + 3]
        assert "-fno-such-flag" in reason
        assert len(reason) < 500, "of ninja's output, what says what is wrong"
        assert remedy.startswith("It takes a C++ compiler")
        assert fallback.startswith("Updates on the CPU fall back to DeepSpeedCPUAdam")


def test_a_rank_that_falls_back_keeps_the_others_from_going_on_in_forward() -> None:
    """Or their collectives would differ."""
    ranks = run_ranks(2, ["-m", "tests.zero.scripts.fallback"], timeout_s=120)
    for finished in ranks:
        assert finished.returncode == 0, finished.output[-4000:]
        assert [its["differences"] for its in finished.answers()] == [[]] * len(CASE.blocks)
        assert [its["deferred"] for its in finished.answers()] == [0] * len(CASE.blocks)
    assert "fall back" not in ranks[0].output
