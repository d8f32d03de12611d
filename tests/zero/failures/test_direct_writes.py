"""Check that ``DEEP_OPT_STATES_CHECK=1`` names the parameters to which a script has written without a wait."""

from __future__ import annotations

import pytest

from tests.launch import run_ranks

WEIGHT = "the partition of layers.{}.weight must only be written to by a call that waits"


@pytest.mark.promise("P6")
@pytest.mark.parametrize("world_size", [1, 2])
def test_direct_writes_are_named_once_and_known_writes_are_not(world_size: int) -> None:
    ranks = run_ranks(world_size, ["-m", "tests.zero.failures.written_ranks"], timeout_s=200)
    for rank, finished in enumerate(ranks):
        assert finished.returncode == 0, finished.output[-4000:]
        direct, *known = finished.answers()
        assert direct["differences"] == []
        expected = [1, 2] if rank == world_size - 1 else [2]
        assert len(direct["logged"]) == len(expected)
        for line, layer in zip(direct["logged"], expected, strict=True):
            assert WEIGHT.format(layer) in line
            assert "modifier_rank" in line
        assert [answer["name"] for answer in known] == ["write_gathered", "write_to_flat_buffers", "write_nothing"]
        for answer in known:
            assert answer["logged"] == [], answer["name"]
            assert answer["differences"] == [], answer["name"]
