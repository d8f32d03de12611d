"""Check that states are on disk and not in memory, that nothing is left, and that a failing disk stops all ranks."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.launch import run_ranks
from tests.tiers import thorough


def answers(*arguments: str, ranks: int = 1) -> list[list[dict[str, Any]]]:
    finished = run_ranks(ranks, ["-m", "tests.zero.disk.disk_ranks", *arguments], timeout_s=600)
    for rank in finished:
        assert rank.returncode == 0, rank.output[-5000:]
    return [rank.answers() for rank in finished]


@pytest.mark.promise("P5")
def test_the_states_on_disk_take_no_host_memory_and_leave_no_file() -> None:
    before = set(Path(tempfile.gettempdir()).iterdir())
    for during, after in answers("mapped", ranks=2):
        assert during["mapped"] == during["on disk"] > 0.5 * 12 * during["numel"]
        assert during["planned"] <= during["pinned"] <= during["planned"] + 100, "and the persistent parameters"
        assert after["mapped"] == 0
    left = set(Path(tempfile.gettempdir()).iterdir()) - before
    assert not [path for path in left if path.name.startswith("deep_opt_states-")]


@pytest.mark.promise("P6")
def test_without_enough_space_for_all_ranks_nothing_is_written() -> None:
    for (found,) in answers("full", ranks=2):
        assert "must have room for the optimizer states of the 2 ranks of this node" in found["error"]
        assert "100 kB" in found["error"] or "0.0001 GB free" in found["error"]
        assert found["mapped"] == 0


@pytest.mark.promise("P6")
def test_a_failing_disk_of_one_rank_stops_all_and_a_checkpoint_restores_the_bits_of_stock() -> None:
    first, second = answers("failing", ranks=2)
    assert len(first) == len(second) == 2
    for of_first, of_second in zip(first, second, strict=True):
        assert "The optimizer states must be readable and writable in" in of_first["ended"]
        assert "another rank" in of_second["ended"] or "rank 0" in of_second["ended"]
        assert of_first["differences"] == of_second["differences"] == []


@pytest.mark.promise("P5")
def test_states_that_do_not_fit_into_free_host_memory_are_on_disk_without_another_key() -> None:
    ((found,),) = answers("fills")
    assert 0 < found["on disk"] < found["all"]
    assert found["differences"] == []


@pytest.mark.promise("P4")
def test_a_run_that_is_killed_after_a_write_resumes_with_the_bits_of_stock(tmp_path: Path) -> None:
    (finished,) = run_ranks(1, ["-m", "tests.zero.disk.disk_ranks", "killed", str(tmp_path)], timeout_s=600)
    assert finished.returncode == -9, finished.output[-5000:]
    assert answers("resumed", str(tmp_path)) == [[{"differences": []}]]


@pytest.mark.parametrize("steps", ["60", thorough("1000")])
def test_training_with_states_on_disk_takes_no_more_memory_with_each_step(steps: str) -> None:
    ((early, late),) = answers("steps", steps)
    assert late["descriptors"] == early["descriptors"]
    assert late["anonymous kB"] <= early["anonymous kB"] + 2000 + 0.1 * int(steps)
