"""Check that damaged checkpoints are refused without any effect."""

from __future__ import annotations

from typing import Any

import pytest

from tests.launch import run_ranks


def loaded(world_size: int, check: str) -> list[dict[str, Any]]:
    """Load the damaged checkpoints, and return the answer for each, and for training on."""
    ranks = run_ranks(world_size, ["-m", "tests.zero.checkpoints.malformed_ranks", check], timeout_s=600)
    assert all(rank.returncode == 0 for rank in ranks), ranks[0].output[-4000:]
    return ranks[0].answers()


@pytest.mark.promise("P4", "P6")
def test_a_damaged_checkpoint_is_refused_or_loaded_as_by_stock_and_training_goes_on() -> None:
    """Check it on two ranks, of which one alone finds the damage."""
    found = loaded(2, "checked")
    assert [one for one in found if one["problems"]] == []
    outcomes = [one["outcome"] for one in found]
    assert outcomes.pop() == "trained on"
    assert outcomes.count("refused") > len(outcomes) / 2
    assert outcomes.count("loaded") > len(outcomes) / 10


def test_without_the_check_a_damaged_checkpoint_ends_in_other_errors_and_changes_the_engine() -> None:
    found = loaded(1, "unchecked")
    failed = [one for one in found if one["outcome"] == "failed"]
    assert len(failed) > len(found) / 4
    assert any(len(one["problems"]) > 1 for one in failed), "a part of the engine was replaced"
