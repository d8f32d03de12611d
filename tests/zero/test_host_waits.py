"""How often a step makes the host wait for the accelerator: once for all that the norms tell, whatever their number."""

from __future__ import annotations

import pytest

from tests.launch import run_ranks
from tests.zero.scripts.host_waits import OVERFLOWS_IN

NORMS = "of_sub_groups < _get_norm_groups < step"
NORMS_AND_OVERFLOW = "overflow < has_overflow < _check_overflow"
"""fp16's. The norms came with it."""

BACKWARD_IS_DONE = "synchronize < _begin < run"
"""The executor's: what the update reads and writes is free."""

UPDATE_IS_DONE = ["synchronize < _drain_streams < run"] * 3
"""One for each of its streams, which the next forward's does not wait for."""

NOBODY_FAILED = {1: [], 2: ["check < _update < _release_sub_group"]}
PERSISTENT_PARAMETERS = {
    1: "wait < wrapped_fn < _allgather_params_coalesced",
    2: "_allgather_params_coalesced < _all_gather < wrapped_fn",
}
"""Gathered by stock, at the end of its step, which waits for that."""


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_host_waits_once_for_the_norms(world_size: int) -> None:
    finished, *_ = run_ranks(world_size, ["-m", "tests.zero.scripts.host_waits"], timeout_s=120)
    assert finished.returncode == 0, finished.output[-5000:]
    answers = finished.answers()
    assert len(answers) == 6
    for found in answers:
        norms = NORMS_AND_OVERFLOW if found["dtype"] == "fp16" else NORMS
        update = [BACKWARD_IS_DONE, *UPDATE_IS_DONE, *NOBODY_FAILED[world_size], PERSISTENT_PARAMETERS[world_size]]
        expected = [[norms, *update] for _ in range(4)]
        expected[OVERFLOWS_IN] = [norms]
        assert found["steps"] == expected, f"{found['dtype']}, {found['block']}"
        assert found["sub-groups"] >= 4, "a wait for each of them would show"
