"""Check the fallback to DeepSpeed's op if the C++ kernel cannot be compiled: the log has the reason, the bits stay."""

from __future__ import annotations

import pytest

from tests.launch import run_ranks
from tests.zero.parity.fallback_kernel_ranks import CASE

RANKS = ["-m", "tests.zero.parity.fallback_kernel_ranks"]
"""Started afresh: the fork server has loaded the compiled kernel already."""


@pytest.mark.promise("P1", "P6")
def test_the_fallback_gives_the_bits_of_stock_and_logs_its_reason() -> None:
    (finished,) = run_ranks(1, RANKS, timeout_s=120, fresh=True)
    assert finished.returncode == 0, finished.output[-4000:]
    found = finished.answers()
    assert [result["block"] for result in found] == list(CASE.blocks)
    for result in found:
        assert result["class"] == "DeepOptimizerStates_Stage3"
        assert result["differences"] == [], result["block"]
        assert result["deferred"] == 0, "the fallback cannot update ranges, so no update may be deferred"

    lines = finished.output.splitlines()
    starts = [number for number, line in enumerate(lines) if "The C++ Adam kernel cannot be compiled" in line]
    assert len(starts) == len(CASE.blocks), "once per engine"
    for start in starts:
        reason, remedy, fallback = lines[start : start + 3]
        assert "-fno-such-flag" in reason
        assert len(reason) < 500, "only the line of ninja's output that states the error"
        assert remedy.startswith("It needs a C++ compiler")
        assert fallback.startswith("Updates on the CPU fall back to DeepSpeedCPUAdam")


def test_no_rank_defers_updates_if_one_rank_falls_back() -> None:
    """Check the agreement of the ranks: otherwise they would call different collectives."""
    ranks = run_ranks(2, RANKS, timeout_s=120, fresh=True)
    for finished in ranks:
        assert finished.returncode == 0, finished.output[-4000:]
        found = finished.answers()
        assert [result["differences"] for result in found] == [[]] * len(CASE.blocks)
        assert [result["deferred"] for result in found] == [0] * len(CASE.blocks)
    assert "fall back" not in ranks[0].output
