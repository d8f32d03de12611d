"""A run that is killed loses what came after its last checkpoint, and nothing else; ``tests/kills.py`` kills more."""

from __future__ import annotations

from pathlib import Path

from tests.launch import run_ranks

KILLS, SEED = 3, 1


def test_restarted_it_gives_the_bits_of_stock_restarted_there(tmp_path: Path) -> None:
    script = ["-m", "tests.zero.scripts.killed", str(tmp_path), str(SEED), str(KILLS)]
    (finished,) = run_ranks(1, script, timeout_s=300)
    assert finished.returncode == 0, finished.output[-4000:]
    kills = finished.answers()
    assert len(kills) == KILLS
    for kill in kills:
        # One that outlives the other for a moment may find that it is alone.
        assert -9 in kill["codes"], kill
        assert set(kill["codes"]) <= {-9, 1}, kill
        assert kill["problem"] == "", kill
