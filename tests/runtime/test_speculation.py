"""Check that speculated steps give the serial bits, and that each part of the speculation is needed for that."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from unittest import mock

import pytest
import torch

from deep_opt_states.device.cpu import HostDevice
from deep_opt_states.device.kernels.adam import RangeUpdate
from deep_opt_states.runtime.actions import Actions
from deep_opt_states.runtime.executor import Executor
from deep_opt_states.runtime.issuer import Issuer
from deep_opt_states.runtime.shadow_states import ShadowStates
from deep_opt_states.runtime.state import UnitState
from perf_model.schedule.action import Lane
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Workload
from tests.fake_device.timing import Seeded, Timing, late_lanes
from tests.runtime.deferred import Habits, deferred, serial
from tests.runtime.plain_adam import PlainAdam, adam_step
from tests.runtime.random_states import (
    assert_equal,
    fill_gradients,
    make_states,
    place,
    same,
    tensors_of,
    update_serially,
)
from tests.runtime.whole_update import run_update

CPU, STREAMED, RESIDENT = Placement.CPU, Placement.STREAMED, Placement.RESIDENT
PLAN = UpdatePlan(
    workload=Workload.from_numels([9, 7, 8, 6, 5]), placements=(CPU, STREAMED, RESIDENT, CPU, CPU), num_slots=1
)
TIMINGS: list[Timing] = [*late_lanes(7), *map(Seeded, range(60))]


def gives_a_wrong_number() -> bool:
    """Return whether some timing gives a wrong number."""
    for number, timing in enumerate(TIMINGS):
        habits = Habits(seed=number, eager=True)
        if not same(deferred(PLAN, timing, habits, steps=4), serial(PLAN, habits, steps=4)):
            return True
    return False


def test_speculated_steps_give_the_serial_bits() -> None:
    assert not gives_a_wrong_number()


def keep_all(issuer: Issuer, is_valid: Callable[[int], bool]) -> None:
    assert callable(is_valid)
    KEEP(issuer, lambda unit: True)


KEEP = Issuer.keep_speculations


@pytest.mark.parametrize(
    ("owner", "method", "replacement"),
    [
        (Actions, "_commit", lambda actions, action: None),
        (Issuer, "keep_speculations", keep_all),
        (Executor, "_forget_speculations", lambda executor: None),
        (ShadowStates, "write_back", lambda shadows: None),
    ],
    ids=["no COMMIT", "all are kept", "none is forgotten", "no version is written back"],
)
def test_a_part_of_the_speculation_that_is_left_out_gives_a_wrong_number(
    owner: type, method: str, replacement: Callable[..., None]
) -> None:
    with mock.patch.object(owner, method, replacement):
        assert gives_a_wrong_number()


class CountingAdam(PlainAdam):
    """An Adam that counts its updates, and waits inside of each until ``may_go_on``."""

    def __init__(self) -> None:
        super().__init__()
        self.started, self.may_go_on = threading.Event(), threading.Event()
        self.updates = 0

    def update_ranges(self, updates: Sequence[RangeUpdate]) -> None:
        self.updates += len(updates)
        self.started.set()
        assert self.may_go_on.wait(10)
        super().update_ranges(updates)


NUMELS = [9, 7]
EAGER = UpdatePlan(workload=Workload.from_numels(NUMELS), placements=(CPU, CPU), num_slots=1, eager=frozenset({0, 1}))


def eager_executor(states: list[UnitState], adam: PlainAdam) -> Executor:
    place(states, EAGER.schedule, HostDevice())
    return Executor(EAGER.schedule, states, HostDevice(), adam, None)


def test_a_kept_step_runs_once_and_a_step_in_vain_runs_again() -> None:
    states, expected, adam = *(make_states(NUMELS, torch.bfloat16) for _ in range(2)), CountingAdam()
    executor = eager_executor(states, adam)
    adam.may_go_on.set()
    for step, (assumed, runs) in enumerate([(0.5, 2), (0.25, 4), (0.5, 2)], 1):
        adam.updates = 0
        for trained in (states, expected):
            fill_gradients(trained, step)
        executor.speculate([0, 1], [adam_step(step, assumed)] * 2, None)
        executor._threads[Lane.CPU].submit(lambda: None).result()
        run_update(executor, [adam_step(step)] * 2)
        update_serially(expected, PlainAdam(), [adam_step(step)] * 2)
        assert adam.updates == runs
    executor.sync_states_to_host()
    assert_equal(states, expected)
    executor.close()


def test_states_are_given_back_only_after_the_step_that_is_speculated() -> None:
    """Check a second update, which is speculated into the sub-group's own memory."""
    states, adam = make_states(NUMELS, torch.bfloat16), CountingAdam()
    executor = eager_executor(states, adam)
    adam.may_go_on.set()
    fill_gradients(states, 1)
    run_update(executor, [adam_step(1)] * 2)
    adam.started.clear()
    adam.may_go_on.clear()
    executor.speculate([0, 1], [adam_step(2)] * 2, None)
    assert adam.started.wait(10)
    given_back = threading.Event()

    def give_back() -> None:
        executor.sync_states_to_host()
        given_back.set()

    reader = threading.Thread(target=give_back)
    reader.start()
    assert not given_back.wait(0.2)
    adam.may_go_on.set()
    reader.join(10)
    expected = make_states(NUMELS, torch.bfloat16)
    fill_gradients(expected, 1)
    update_serially(expected, PlainAdam(), [adam_step(1)] * 2)
    assert_equal(states, expected)
    executor.close()


def test_states_that_are_loaded_after_a_failure_replace_those_in_shadows() -> None:
    states, loaded = (make_states(NUMELS, torch.bfloat16, seed=seed) for seed in (0, 1))
    executor = eager_executor(states, PlainAdam())
    fill_gradients(states, 1)
    run_update(executor, [adam_step(1)] * 2)
    executor.fail(RuntimeError("on another rank"))
    executor.sync_states_to_host()
    for own, source in zip(tensors_of(states), tensors_of(loaded), strict=True):
        own.copy_(source)
    executor.clear_failure()
    for trained in (states, loaded):
        fill_gradients(trained, 2)
    run_update(executor, [adam_step(2)] * 2)
    executor.sync_states_to_host()
    update_serially(loaded, PlainAdam(), [adam_step(2)] * 2)
    assert_equal(states, loaded)
    executor.close()


def test_an_error_of_a_speculated_step_fails_the_update_only_if_the_step_is_kept() -> None:
    for assumed, fails in ((0.5, True), (0.25, False)):
        states, adam = make_states(NUMELS, torch.bfloat16), PlainAdam()
        executor = eager_executor(states, adam)
        fill_gradients(states, 1)
        with mock.patch.object(adam, "update_ranges", side_effect=OSError("no memory")):
            executor.speculate([0], [adam_step(1, assumed)] * 2, None)
            executor._threads[Lane.CPU].submit(lambda: None).result()
        executor.begin([adam_step(1)] * 2)
        executor.end()
        assert isinstance(executor.failure, OSError) == fails
        executor.close()
