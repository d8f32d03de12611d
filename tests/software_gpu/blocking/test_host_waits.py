"""Check where the host waits for the accelerator: a step waits once for all norms, however many units there are.

During a deferred update, forward makes the host wait for updates on the CPU only, and backward for the rest.
"""

from __future__ import annotations

import pytest

from tests.software_gpu.blocking.host_wait_ranks import OVERFLOWS_IN, STEPS
from tests.tiers import thorough
from tests.zero.training_once import ProgramRanks, TrainingOnce, on_one_worker

NORMS = "per_sub_group < _get_norm_groups"
NORMS_AND_OVERFLOW = "overflow < has_overflow"
"""The wait with fp16, for the overflow flag. The norms are copied together with the flag."""

BACKWARD_IS_DONE = "synchronize < wait_for_caller"
"""The executor waits for the caller's stream: the update may then read gradients and write parameters."""

LAST_UPDATE_IS_OVER, FLUSHES_ARE_OVER = "synchronize < phases", "synchronize < timeline"
"""The report of an update waits for its events, at the end of the next step. The update has ended long before."""

CPU_HAS_UPDATED = "wait_for_worker < finish"
PARAMETERS_ARE_UPDATED = "wait_for_worker < bring_out"
"""The waits for our worker: one for the PUBLISH of each unit, at the end of the update or where forward needs the
parameters, and at the end one for each CPU_STEP, which may have failed."""

PERSISTENT_UNIT_IS_PUBLISHED = [PARAMETERS_ARE_UPDATED] * 2

UPDATE_IS_DONE = ["synchronize < wait_until_drained"] * 4
"""One wait per stream of an update that ends in the step, which the streams of the next forward do not wait for."""

RANKS_AGREE = {1: [], 2: ["share < synchronize_ranks"]}
PERSISTENT_PARAMETERS = {1: "wait < wrapped_fn", 2: "synchronize < _allgather_params_coalesced"}
"""Stock's wait for the gather of persistent parameters at the end of its step."""

TOO_MANY_GATHERS = "_fetch_sub_module_impl < fetch_sub_module"
"""Stock's wait for an old gather while several have not finished, which depends on the time that they take."""

OWN_WAITS_OUTSIDE_STEPS = {PARAMETERS_ARE_UPDATED, CPU_HAS_UPDATED, *UPDATE_IS_DONE}
STEPS_THAT_UPDATE = [step for step in range(STEPS) if step != OVERFLOWS_IN]


RANKS = ProgramRanks("tests.software_gpu.blocking.host_wait_ranks", timeout_s=200)
WORLD_SIZES = [
    pytest.param(1, marks=on_one_worker(RANKS.program, 1)),
    thorough(2, on_one_worker(RANKS.program, 2)),
]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_step_waits_once_for_all_norms_and_then_for_each_update_on_the_cpu(
    world_size: int, trained: TrainingOnce
) -> None:
    pairs = trained.answers(world_size)[0]
    assert len(pairs) == 9
    for at_once, deferred in pairs:
        norms_wait = NORMS_AND_OVERFLOW if at_once["dtype"] == "fp16" else NORMS
        on_cpu = at_once["on the CPU"]
        assert at_once["units"] >= 4, "a wait per unit would be noticed"
        is_over = {LAST_UPDATE_IS_OVER} if on_cpu == at_once["units"] else {LAST_UPDATE_IS_OVER, FLUSHES_ARE_OVER}
        all_updated = [CPU_HAS_UPDATED] * (2 * on_cpu) + UPDATE_IS_DONE
        ranks_agree = RANKS_AGREE[world_size]
        for how, found in (("at once", at_once), ("deferred", deferred)):
            label = f"{how}, {found['dtype']}, {found['block']}"
            for step, waits in enumerate(found["step"]):
                # Before the norms, the ranks agree how a deferred update and the prefetches in backward have ended.
                in_step = [*all_updated, *ranks_agree] if how == "at once" else PERSISTENT_UNIT_IS_PUBLISHED
                ends = [BACKWARD_IS_DONE, *in_step, PERSISTENT_PARAMETERS[world_size]]
                updated = ends if step in STEPS_THAT_UPDATE else []
                until_norms = len(ranks_agree) + 1
                assert waits[:until_norms] == [*ranks_agree, norms_wait], f"{label}, step {step}"
                reported = waits[until_norms + len(updated) :]
                assert waits[until_norms : until_norms + len(updated)] == updated, f"{label}, step {step}"
                assert set(reported) == (is_over if step - 1 in STEPS_THAT_UPDATE else set()), f"{label}, step {step}"


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_an_update_is_reported_after_the_next_one_is_issued(world_size: int, trained: TrainingOnce) -> None:
    """Check that the report, for which the host waits, does not leave the accelerator without work."""
    for _, found in trained.answers(world_size)[0]:
        # Two reports come while no update is pending: in the step that overflows, and at the end of the engine.
        assert found["left to issue when the last update is reported"] == [0] * (len(STEPS_THAT_UPDATE) - 2)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_deferred_update_makes_forward_wait_for_the_cpu_only_and_ends_before_backward(
    world_size: int, trained: TrainingOnce
) -> None:
    in_forward = []
    for at_once, deferred in trained.answers(world_size)[0]:
        stock_waits = {wait for phase in ("forward", "backward") for waits in at_once[phase] for wait in waits}
        stock_waits.add(TOO_MANY_GATHERS)
        assert not stock_waits & OWN_WAITS_OUTSIDE_STEPS
        for step in range(STEPS):
            label = f"{deferred['dtype']}, {deferred['block']}, step {step}"
            forward, backward = (
                [wait for wait in deferred[phase][step] if wait not in stock_waits] for phase in ("forward", "backward")
            )
            if step - 1 not in STEPS_THAT_UPDATE:
                assert forward == backward == [], label
                continue
            assert set(forward) <= {PARAMETERS_ARE_UPDATED}, label
            # The persistent unit was waited for in the step.
            left = 2 * (deferred["on the CPU"] - 1) - len(forward)
            assert backward == [CPU_HAS_UPDATED] * left, label
            in_forward.append(len(forward))
    assert max(in_forward) >= 3, "nothing was deferred"
