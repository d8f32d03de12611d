"""A failure in an update is loud on every rank, leaves nothing hanging, and loses nothing but the step."""

from __future__ import annotations

import os

import pytest

from tests.launch import run_ranks


def test_a_failing_lane_stops_every_rank() -> None:
    for finished in run_ranks(2, ["-m", "tests.zero.scripts.failing", "cpu", "compute"], timeout_s=120):
        assert finished.returncode == 0, finished.output[-4000:]
        for lane in ("cpu", "compute"):
            assert f"recovered on {lane}" in finished.output


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs to move threads between")
def test_an_engine_that_cannot_be_made_leaves_no_thread_bound() -> None:
    for finished in run_ranks(2, ["-m", "tests.zero.scripts.unmade"], timeout_s=120):
        assert finished.returncode == 0, finished.output[-4000:]
        assert "made" in finished.output
