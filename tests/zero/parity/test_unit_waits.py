"""Check that forward waits for the units that hold a module's parameters, and not for their whole sub-group."""

from __future__ import annotations

from itertools import accumulate

import pytest

from tests.launch import run_ranks
from tests.tiers import thorough


@pytest.mark.promise("P2")
@pytest.mark.parametrize("world_size", [1, thorough(2)])
def test_a_modules_forward_waits_only_for_the_units_that_hold_its_parameters(world_size: int) -> None:
    for finished in run_ranks(world_size, ["-m", "tests.zero.parity.unit_wait_ranks"], timeout_s=200):
        assert finished.returncode == 0, finished.output[-4000:]
        on_cpu, streamed, naive = finished.answers()
        for found in (on_cpu, streamed):
            assert found["units"] >= 4, "one sub-group, several units"
            needed = [sorted(units) for units in accumulate(map(set, found["needed"]), set.union)]
            assert found["waited"] == needed, found["block"]
            assert len(needed[0]) < found["units"]
        assert naive["waited"][0] == list(range(naive["units"])), "the rewrite waits for the whole sub-group"


def test_the_hooks_of_modules_do_nothing_once_the_update_has_ended() -> None:
    (finished,) = run_ranks(1, ["-m", "tests.zero.parity.ended_update_ranks"], timeout_s=200)
    assert finished.returncode == 0, finished.output[-4000:]
    for found in finished.answers():
        assert found["forward"] == {}
        # Before backward, the plan may change. In it, the update is ended, and the next one is prefetched.
        assert found["both"].keys() <= {"sections", "events"}
        assert found["both"]["sections"] <= 3, "none per module or per bucket"
