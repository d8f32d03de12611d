"""How often a step makes the host wait for the accelerator: once for all that the norms tell, whatever their number.

Where the update goes on in the next forward, nothing there waits but for the CPU's updates, and backward for the rest.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.launch import run_ranks
from tests.tiers import thorough
from tests.zero.scripts.host_waits import OVERFLOWS_IN, STEPS

NORMS = "of_sub_groups < _get_norm_groups"
NORMS_AND_OVERFLOW = "overflow < has_overflow"
"""fp16's. The norms came with it."""

BACKWARD_IS_DONE = "synchronize < _wait_for_caller"
"""The executor's: what the update reads and writes is free."""

LAST_UPDATE_IS_OVER = "synchronize < phases"
"""Which it is, before the norms: nobody waits. It is reported at the end of the step, when the next is under way."""

FIRST_PARTS_ARE_UPDATED = "update < begin"
"""By our worker."""

CPU_HAS_UPDATED, PARAMETERS_ARE_UPDATED = "_issue < finish", "_issue < publish"
"""By our worker, too: one sub-group each, at the end of the update or where forward needs it."""

UPDATE_IS_DONE = ["synchronize < _drain_streams"] * 3
"""One for each of its streams, which neither the next forward's nor backward's wait for."""

NOBODY_FAILED = {1: [], 2: ["share < settle"]}
PERSISTENT_PARAMETERS = {1: "wait < wrapped_fn", 2: "_allgather_params_coalesced < _all_gather"}
"""Gathered by stock, at the end of its step, which waits for that: with several ranks for the whole device."""

OURS_OUTSIDE_OF_STEPS = {PARAMETERS_ARE_UPDATED, CPU_HAS_UPDATED, *UPDATE_IS_DONE}
STEPS_THAT_UPDATE = [step for step in range(STEPS) if step != OVERFLOWS_IN]


@cache
def answers(world_size: int) -> list[dict[str, Any]]:
    finished, *_ = run_ranks(world_size, ["-m", "tests.zero.scripts.host_waits"], timeout_s=200)
    assert finished.returncode == 0, finished.output[-5000:]
    return finished.answers()


WORLD_SIZES = [
    thorough(1, pytest.mark.xdist_group("host waits of 1")),
    pytest.param(2, marks=pytest.mark.xdist_group("host waits of 2")),
]
"""One worker of pytest-xdist runs both tests of a world size, which train once."""


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_whom_the_host_waits_for(world_size: int) -> None:
    pairs = answers(world_size)
    assert len(pairs) == 9
    for at_once, deferred in pairs:
        of_norms = NORMS_AND_OVERFLOW if at_once["dtype"] == "fp16" else NORMS
        on_cpu = at_once["on the CPU"]
        assert at_once["sub-groups"] >= 4, "a wait for each of them would show"
        all_updated = [CPU_HAS_UPDATED] * on_cpu + UPDATE_IS_DONE + NOBODY_FAILED[world_size]
        updated_in_step = {
            "at once": [BACKWARD_IS_DONE, *all_updated, PERSISTENT_PARAMETERS[world_size]],
            "deferred": [BACKWARD_IS_DONE, FIRST_PARTS_ARE_UPDATED, PERSISTENT_PARAMETERS[world_size]],
        }
        for how, found in (("at once", at_once), ("deferred", deferred)):
            what = f"{how}, {found['dtype']}, {found['block']}"
            for step, waits in enumerate(found["step"]):
                # How the last update ended is asked before the next.
                asked = NOBODY_FAILED[world_size] if how == "deferred" and step - 1 in STEPS_THAT_UPDATE else []
                updated = updated_in_step[how] if step in STEPS_THAT_UPDATE else []
                until_norms = len(asked) + 1
                assert waits[:until_norms] == [*asked, of_norms], f"{what}, step {step}"
                reported = waits[until_norms + len(updated) :]
                assert waits[until_norms : until_norms + len(updated)] == updated, f"{what}, step {step}"
                assert set(reported) == ({LAST_UPDATE_IS_OVER} if step - 1 in STEPS_THAT_UPDATE else set()), (
                    f"{what}, step {step}"
                )


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_an_update_is_reported_when_the_next_one_is_issued_so_that_the_accelerator_does_not_wait_for_it(
    world_size: int,
) -> None:
    streamed = [deferred for _, deferred in answers(world_size) if deferred["on the CPU"] == 0]
    assert len(streamed) == 3
    for found in streamed:
        # The step that overflows reports the update before it, and the end of the engine the last one.
        assert found["left to issue when the last update is reported"] == [0] * (len(STEPS_THAT_UPDATE) - 2)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_deferred_update_makes_forward_wait_for_the_cpu_alone_and_ends_before_backward(world_size: int) -> None:
    in_forward = []
    for at_once, deferred in answers(world_size):
        stocks = {wait for phase in ("forward", "backward") for waits in at_once[phase] for wait in waits}
        assert not stocks & OURS_OUTSIDE_OF_STEPS
        for step in range(STEPS):
            what = f"{deferred['dtype']}, {deferred['block']}, step {step}"
            forward, backward = (
                [wait for wait in deferred[phase][step] if wait not in stocks] for phase in ("forward", "backward")
            )
            if step - 1 not in STEPS_THAT_UPDATE:
                assert forward == backward == [], what
                continue
            assert set(forward) <= {PARAMETERS_ARE_UPDATED}, what
            left = deferred["on the CPU"] - len(forward)
            assert backward == [CPU_HAS_UPDATED] * left + UPDATE_IS_DONE, what
            in_forward.append(len(forward))
    assert max(in_forward) >= 3, "nothing was deferred"
