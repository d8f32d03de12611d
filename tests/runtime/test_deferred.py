"""Check that updates that overlap with the next forward give the serial bits under hostile timing.

Each wait of the executor is also left out, which must give a wrong number in some timing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st

from deep_opt_states.device.cpu import HostDevice
from deep_opt_states.runtime.executor import Executor, Waiter
from deep_opt_states.runtime.issuer import Issuer
from deep_opt_states.runtime.lanes import LaneStreams
from deep_opt_states.runtime.state import UnitState
from perf_model.schedule import check
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.schedule import Schedule
from perf_model.schedule.slots_between_updates import flushes_before
from perf_model.schedule.workload import Workload
from tests.fake_device.device import FakeDevice, FakeStream, LateAdam
from tests.fake_device.fake_worker import FakeWorker
from tests.fake_device.timing import Late, Seeded, Timing, late_lanes
from tests.model.strategies import plans
from tests.runtime.deferred import Habits, deferred, serial
from tests.runtime.hostile import hostile_executor, pinned_states
from tests.runtime.plain_adam import PlainAdam, adam_step
from tests.runtime.random_states import (
    assert_equal,
    cut,
    fill_gradients,
    make_states,
    place,
    same,
    tensors_of,
    update_serially,
    with_persistent,
)
from tests.runtime.whole_update import run_update

CPU, STREAMED, RESIDENT = Placement.CPU, Placement.STREAMED, Placement.RESIDENT
GRAD_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LANES = 7
"""The number of lanes: the stream of the gathers, the executor's four, the CPU lane and the caller's stream."""

timings = st.one_of(st.builds(Late, st.permutations(range(LANES))), st.builds(Seeded, st.integers(0, 2**32)))


@st.composite
def cut_up(draw: st.DrawFn, numel: int) -> list[tuple[int, int]]:
    """Draw ranges of ``numel`` elements that do not overlap; some are adjacent, and some cover everything."""
    borders = sorted(draw(st.lists(st.integers(0, numel), max_size=6)))
    ranges = list(pairwise(borders))
    return [drawn for drawn in ranges if draw(st.booleans())] if draw(st.booleans()) else ranges or [(0, numel)]


@st.composite
def habits_of(draw: st.DrawFn, plan: UpdatePlan) -> Habits:
    return Habits(
        seed=draw(st.integers(0, 2**32)),
        prefetches=draw(st.booleans()),
        writes=draw(st.booleans()),
        persistent=[draw(cut_up(unit.numel)) for unit in plan.workload.units],
        grad_dtypes=[draw(st.sampled_from(GRAD_DTYPES)) for _ in plan.workload.units],
        params_on_host=draw(st.booleans()),
        eager=draw(st.booleans()),
    )


@given(st.data(), plans(max_numel=300), timings, st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
def test_a_deferred_update_gives_the_serial_bits_whatever_the_timing(
    data: st.DataObject, plan: UpdatePlan, timing: Timing, dtype: torch.dtype
) -> None:
    habits = data.draw(habits_of(plan))
    note(f"{plan.schedule}\n{habits}")
    assert same(deferred(plan, timing, habits, dtype=dtype), serial(plan, habits, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("params_on_host", [True, False])
def test_the_cpu_writes_parameters_in_host_memory_where_they_are(params_on_host: bool, dtype: torch.dtype) -> None:
    """Check that parameters in host memory are not copied, while those on the accelerator are published.

    The latter holds for persistent parameters, all of which take one copy and one kernel, and for the others.
    """
    plan = UpdatePlan(workload=Workload.from_numels([9, 7]), placements=(CPU, CPU), num_slots=1)
    plan = with_persistent(plan, [[(0, 2)], [(3, 5)]])
    device = FakeDevice(Late())
    whole = pinned_states(device, [9, 7], dtype, params_on_host=params_on_host)
    states = cut(whole, plan.workload, device)
    executor = Executor(plan.schedule, states, device, PlainAdam(), None, worker=FakeWorker(device))
    before = [param.clone() for param in tensors_of(whole, ["param"])]
    for grad in tensors_of(whole, ["grad"]):
        grad.fill_(1)
    with (
        mock.patch.object(device, "copy", wraps=device.copy) as copy,
        mock.patch.object(device, "copy_each", wraps=device.copy_each) as copy_each,
    ):
        run_update(executor, [adam_step(1)] * 2)
    # The first unit has one range after its persistent parameters, the second also one before.
    assert copy.call_count == (0 if params_on_host else 1 + 1 + 2)
    assert copy_each.call_count == (0 if params_on_host else 1)
    params = zip(tensors_of(whole, ["param"]), before, strict=True)
    assert not any(torch.equal(param, old) for param, old in params)


PLAN = UpdatePlan(
    workload=Workload.from_numels([9, 7, 8, 6, 5]), placements=(CPU, STREAMED, RESIDENT, STREAMED, CPU), num_slots=1
)
PERSISTENT = [[(0, 2), (5, 6)], [(3, 7)], [(2, 4)], [], [(0, 5)]]
TIMINGS: list[Timing] = [
    *late_lanes(LANES),
    *(Seeded(seed) for seed in range(60)),
]


def gives_a_wrong_number(
    persistent: list[list[tuple[int, int]]] = PERSISTENT, plan: UpdatePlan = PLAN, timings: Sequence[Timing] = TIMINGS
) -> bool:
    """Return whether some timing gives a wrong number."""
    for number, timing in enumerate(timings):
        habits = Habits(seed=number, persistent=persistent, writes=number % 2 == 0)
        if not same(deferred(plan, timing, habits), serial(plan, habits)):
            return True
    return False


def test_plan_without_mutation_gives_the_serial_bits() -> None:
    assert not gives_a_wrong_number()


def test_states_that_are_given_back_have_the_flushes_that_were_in_flight() -> None:
    """Check a plan without residents, whose copies to host memory would wait for the flushes, too."""
    plan = UpdatePlan(workload=Workload.from_numels([9, 7]), placements=(STREAMED, STREAMED), num_slots=1)
    assert not gives_a_wrong_number([[], []], plan)


@pytest.mark.parametrize(
    ("owner", "method"),
    [
        (LaneStreams, "wait_for_caller"),
        (LaneStreams, "wait_until_drained"),
        (Executor, "publish"),
    ],
)
def test_leaving_out_a_wait_of_the_executor_gives_a_wrong_number(owner: type, method: str) -> None:
    with mock.patch.object(owner, method):
        assert gives_a_wrong_number()


def test_a_caller_that_is_not_ordered_after_the_update_gives_a_wrong_number() -> None:
    """Check units that forward does not read. Nothing is updated on the CPU, which the host would wait for."""
    plan = replace(PLAN, placements=(STREAMED, RESIDENT, STREAMED, RESIDENT, STREAMED))
    # The compute and d2h lanes are behind the caller's stream.
    caller_first = [Late([0, 1, 4, 5, 6, 3, 2])] * 30
    assert not gives_a_wrong_number(plan=plan, timings=caller_first)
    with mock.patch.object(LaneStreams, "order_after_update"):
        assert gives_a_wrong_number(plan=plan, timings=caller_first)


def test_prefetches_that_do_not_wait_for_flushes_in_flight_give_a_wrong_number() -> None:
    set_schedule = Issuer.set_schedule

    def set_without_waits(self: Issuer, schedule: Schedule) -> None:
        set_schedule(self, schedule)
        self.flushes_before = {}

    with mock.patch.object(Issuer, "set_schedule", set_without_waits):
        assert gives_a_wrong_number()


THREE_IN_TWO_SLOTS = replace(PLAN, placements=(CPU, STREAMED, STREAMED, STREAMED, CPU), num_slots=2)
"""A plan whose units use other slots in the next update. It is used without persistent parameters."""


def flushes_of_the_same_units(schedule: Schedule) -> dict[str, str]:
    return {prefetch: prefetch.replace("PREFETCH", "FLUSH_STATES") for prefetch in flushes_before(schedule)}


@pytest.mark.parametrize(
    ("name", "replacement"),
    [("issuer.flushes_before", flushes_of_the_same_units), ("issuer.slot_shift", lambda _: 0)],
    ids=["waits for the flush of its unit only", "uses the same slots in each update"],
)
def test_a_prefetch_that_does_not_wait_for_the_flush_out_of_its_shifted_slot_gives_a_wrong_number(
    name: str, replacement: Callable[[Schedule], object]
) -> None:
    none: list[list[tuple[int, int]]] = [[]] * 5
    assert not gives_a_wrong_number(none, THREE_IN_TWO_SLOTS)
    with mock.patch(f"deep_opt_states.runtime.{name}", replacement), mock.patch.object(check, "check_next_update"):
        assert gives_a_wrong_number(none, THREE_IN_TWO_SLOTS)


def test_caller_that_does_not_wait_for_published_parameters_reads_a_wrong_number() -> None:
    """Check it for the units that the caller gathers, and for persistent parameters."""
    waits = FakeStream.wait

    def wait(self: FakeStream, event: Any) -> None:
        if self.queue not in self._device.lanes._streams[1:5]:
            return
        waits(self, event)

    with mock.patch.object(FakeStream, "wait", wait):
        assert gives_a_wrong_number()


def test_a_write_to_the_states_after_a_prefetch_needs_the_states_back() -> None:
    """Check that the update starts from the written states after ``sync_states_to_host``, else from the old ones."""
    found = []
    for gives_back in (True, False):
        device = FakeDevice()
        states = make_states([4], torch.bfloat16)
        states[0].parts[0].master = device.empty_host(4, torch.float32).copy_(states[0].parts[0].master)
        for name in ("exp_avg", "exp_avg_sq", "grad"):
            setattr(states[0].parts[0], name, device.empty_host(4, torch.float32).zero_())
        plan = UpdatePlan(workload=Workload.from_numels([4]), placements=(STREAMED,), num_slots=1)
        place(states, plan.schedule, HostDevice())
        executor = Executor(plan.schedule, states, HostDevice(), PlainAdam(), PlainAdam())
        executor.prefetch()
        states[0].parts[0].master.fill_(7.0)
        if gives_back:
            executor.sync_states_to_host()
        run_update(executor, [adam_step(1)])
        executor.close()
        found.append(bool((states[0].parts[0].master > 6).all()))
    assert found == [True, False]


class FailsOnce(PlainAdam):
    """A kernel that raises in its first step."""

    def update(self, *args: Any) -> None:
        if len(self.begun) == 1:
            raise ZeroDivisionError
        super().update(*args)


def load(states: Sequence[UnitState]) -> None:
    """Load the states as from a checkpoint: the host writes to them at once."""
    for state, loaded in zip(
        states, make_states([state.length for state in states], torch.bfloat16, seed=7), strict=True
    ):
        for name in ("master", "exp_avg", "exp_avg_sq"):
            getattr(state.parts[0], name).copy_(getattr(loaded.parts[0], name))


def assert_next_update_starts_from_loaded_states(executor: Executor, states: Sequence[UnitState]) -> None:
    """Load the three units ``states``, of 4 elements each, after a failure, and check the next update of them."""
    load(states)
    executor.clear_failure()
    run_update(executor, [adam_step(2)] * 3)
    expected = make_states([4] * 3, torch.bfloat16)
    fill_gradients(expected, 1)
    load(expected)
    update_serially(expected, PlainAdam(), [adam_step(2)] * 3)
    assert_equal(states, expected)


def test_next_update_after_a_failure_starts_from_the_loaded_states() -> None:
    """Check that neither a flush of the failed update nor a prefetch for it reaches the loaded states."""
    plan = UpdatePlan(
        workload=Workload.from_numels([4] * 3), placements=(STREAMED, CPU, STREAMED), num_slots=1, order=(0, 1, 2)
    )
    for timing in TIMINGS:
        device = FakeDevice(timing)
        device.stream()  # the timings order LANES lanes, and the executor adds one stream less
        states = pinned_states(device, [4] * 3, torch.bfloat16)
        place(states, plan.schedule, device)
        late = LateAdam(device, PlainAdam())
        executor = Executor(plan.schedule, states, device, FailsOnce(), late, worker=FakeWorker(device))
        fill_gradients(states, 1)
        executor.prefetch()
        executor.begin([adam_step(1)] * 3)
        executor.end()
        assert isinstance(executor.failure, ZeroDivisionError)
        assert_next_update_starts_from_loaded_states(executor, states)


def test_states_are_loaded_after_flushes_in_flight_if_the_update_has_failed_on_another_rank() -> None:
    plan = UpdatePlan(workload=Workload.from_numels([4] * 3), placements=(STREAMED,) * 3, num_slots=1)
    for timing in TIMINGS:
        device = FakeDevice(timing)
        states = pinned_states(device, [4] * 3, torch.bfloat16)
        executor = hostile_executor(plan.schedule, states, device)
        fill_gradients(states, 1)
        executor.begin([adam_step(1)] * 3)
        executor.end(Waiter.STREAM)
        executor.fail(ZeroDivisionError())
        executor.end()
        assert_next_update_starts_from_loaded_states(executor, states)
