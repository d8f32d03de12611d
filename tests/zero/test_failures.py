"""A failure in an update is loud on every rank, leaves nothing hanging, and loses nothing but the step."""

from __future__ import annotations

import pytest

from tests.launch import run_ranks


@pytest.mark.parametrize("lane", ["cpu", "compute"])
def test_a_failing_lane_stops_every_rank(lane: str) -> None:
    for finished in run_ranks(2, ["-m", "tests.zero.scripts.failing", lane], timeout_s=120):
        assert finished.returncode == 0, finished.output[-4000:]
        assert "recovered" in finished.output
