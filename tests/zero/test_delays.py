"""A rank's or a worker's timing changes neither a bit nor the order of collectives."""

from __future__ import annotations

import pytest

from tests.launch import run_ranks


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_delays_change_nothing(world_size: int) -> None:
    for finished in run_ranks(world_size, ["-m", "tests.zero.scripts.delayed", "1", "2", "3"], timeout_s=120):
        assert finished.returncode == 0, finished.output[-4000:]
        answers = finished.answers()
        assert [answer["seed"] for answer in answers] == [1, 2, 3]
        for answer in answers:
            assert answer["differences"] == []
            assert answer["same"], "ranks called different collectives"
            assert answer["collectives"] > 100
