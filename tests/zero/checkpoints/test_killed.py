"""Check that a killed run loses only the steps after its last checkpoint. ``tests/kills.py`` kills more runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch import run_ranks

KILLS, SEED = 3, 1


@pytest.mark.promise("P1", "P4")
@pytest.mark.parametrize("beside", [(), pytest.param(("AutoTP",), marks=pytest.mark.thorough, id="beside AutoTP")])
def test_a_killed_run_resumes_from_its_last_checkpoint_with_the_bits_of_stock(
    beside: tuple[str, ...], tmp_path: Path
) -> None:
    """Check it on two ranks, and beside tensor parallelism on four."""
    script = ["-m", "tests.zero.checkpoints.killed_ranks", str(tmp_path), str(SEED), str(KILLS), *beside]
    (finished,) = run_ranks(1, script, timeout_s=900)
    assert finished.returncode == 0, finished.output[-4000:]
    kills = finished.answers()
    assert len(kills) == KILLS
    for kill in kills:
        # A rank that outlives the other for a moment may fail in a collective.
        assert -9 in kill["codes"], kill
        assert set(kill["codes"]) <= {-9, 1}, kill
        assert kill["problem"] == "", kill
