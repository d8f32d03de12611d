"""Check that a failure is raised on every rank, that no rank hangs, and that no thread stays bound."""

from __future__ import annotations

import os

import pytest

from tests.launch import run_ranks


@pytest.mark.promise("P6")
def test_a_failed_update_on_any_lane_stops_every_rank_and_a_checkpoint_recovers() -> None:
    for finished in run_ranks(2, ["-m", "tests.zero.failures.failing_ranks", "cpu", "compute"], timeout_s=120):
        assert finished.returncode == 0, finished.output[-4000:]
        for lane in ("cpu", "compute"):
            assert f"recovered on {lane}" in finished.output


@pytest.mark.promise("P6")
@pytest.mark.parametrize("place", ["between", "speculation"])
def test_a_failure_between_two_updates_stops_every_rank_and_a_checkpoint_recovers(place: str) -> None:
    for finished in run_ranks(2, ["-m", "tests.zero.failures.failing_ranks", place], timeout_s=120):
        assert finished.returncode == 0, finished.output[-4000:]
        assert f"recovered on {place}" in finished.output


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs to move threads between")
def test_an_engine_that_fails_to_initialize_leaves_no_thread_bound() -> None:
    for finished in run_ranks(2, ["-m", "tests.zero.failures.unmade_engine_ranks"], timeout_s=120):
        assert finished.returncode == 0, finished.output[-4000:]
        assert "all threads are free" in finished.output
