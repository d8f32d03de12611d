"""Check that damaged checkpoints are refused without any effect. ``tests/malformed.py`` loads more of them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.launch import run_ranks

SEED = 11


def loaded(world_size: int, count: int, *options: str) -> list[dict[str, Any]]:
    """Load ``count`` damaged checkpoints, and return the answer for each, and for training on."""
    script = ["-m", "tests.zero.checkpoints.malformed_ranks", str(SEED), str(count), *options]
    ranks = run_ranks(world_size, script, timeout_s=900)
    assert all(rank.returncode == 0 for rank in ranks), ranks[0].output[-4000:]
    found = ranks[0].answers()
    assert len(found) == count + 1
    return found


@pytest.mark.promise("P4", "P6")
@pytest.mark.parametrize("count", [15, pytest.param(200, marks=pytest.mark.thorough)])
def test_a_damaged_checkpoint_is_refused_or_loaded_as_by_stock_and_training_goes_on(count: int) -> None:
    """Check it on two ranks, of which one alone finds the damage."""
    found = loaded(2, count)
    assert [one for one in found if one["problems"]] == []
    outcomes = [one["outcome"] for one in found]
    assert outcomes.count("refused") > count / 3
    assert outcomes.count("loaded") > count / 10


def test_without_the_check_a_damaged_checkpoint_ends_in_other_errors_and_changes_the_engine() -> None:
    found = loaded(1, 15, "unchecked")
    failed = [one for one in found if one["outcome"] == "failed"]
    assert len(failed) > 3
    assert any(len(one["problems"]) > 1 for one in failed), "a part of the engine was replaced"
