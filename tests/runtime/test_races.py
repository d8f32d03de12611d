"""Schedules under hostile timing: good ones give the serial bits, and each missing wait shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deep_opt_states.device.fake import Deadlock, FakeDevice, LateAdam
from deep_opt_states.runtime import executor as executor_module
from deep_opt_states.runtime.executor import Executor, UpdateFailed
from deep_opt_states.runtime.fake_worker import FakeWorker
from deep_opt_states.runtime.state import SubGroupState
from perf_model.action import Lane
from perf_model.check import ScheduleError, check
from perf_model.placement import Placement
from perf_model.plan import UpdatePlan
from perf_model.schedule import Schedule
from perf_model.workload import Workload
from tests.model.strategies import plans
from tests.runtime.adam import PlainAdam, adam_step
from tests.runtime.states import NAMES, fill_gradients, make_states, update_serially

ORDERS = list(permutations(range(len(Lane))))
"""Every priority among the three streams and the CPU lane."""


def pinned_states(device: FakeDevice, numels: Sequence[int]) -> list[SubGroupState]:
    """Host memory that copies without blocking; the parameters are device memory."""
    states = make_states(numels, torch.bfloat16)
    for state in states:
        for name in ("master", "exp_avg", "exp_avg_sq", "grad", "rounded"):
            plain = getattr(state, name)
            setattr(state, name, device.empty_host(plain.numel(), plain.dtype).copy_(plain))
        state.param = device.empty(state.numel, torch.bfloat16).copy_(state.param)
    return states


def run(schedule: Schedule, numels: Sequence[int], order: Sequence[int], steps: int = 2) -> list[SubGroupState]:
    device = FakeDevice(order)
    states = pinned_states(device, numels)
    executor = Executor(schedule, states, device, PlainAdam(), LateAdam(device, PlainAdam()), worker=FakeWorker(device))
    for step in range(1, steps + 1):
        fill_gradients(states, step)
        executor.run([adam_step(step)] * len(numels))
    return states


def serial(numels: Sequence[int], steps: int = 2) -> list[SubGroupState]:
    states = make_states(numels, torch.bfloat16)
    for step in range(1, steps + 1):
        fill_gradients(states, step)
        update_serially(states, PlainAdam(), [adam_step(step)] * len(numels))
    return states


def same(found: Sequence[SubGroupState], expected: Sequence[SubGroupState]) -> bool:
    return all(
        torch.equal(getattr(ours, name), getattr(theirs, name))
        for ours, theirs in zip(found, expected, strict=True)
        for name in NAMES
    )


tiny_plans = plans().filter(lambda plan: plan.workload.numel < 20_000)


@settings(max_examples=60)
@given(tiny_plans, st.sampled_from(ORDERS))
def test_a_good_schedule_gives_the_serial_bits_whatever_the_timing(plan: UpdatePlan, order: Sequence[int]) -> None:
    numels = [sub_group.numel for sub_group in plan.workload.sub_groups]
    assert same(run(plan.schedule, numels, order, steps=3), serial(numels, steps=3))


NUMELS = (5, 3, 8, 2, 7, 4)


def small_plans() -> Iterator[UpdatePlan]:
    """All placements of 4 sub-groups, and mixes of 6, with 1 to 4 slots."""
    for count, codes in ((4, range(2**4)), (6, (0b111111, 0b010101, 0b110110, 0b011110))):
        for code in codes:
            placements = tuple(Placement.STREAMED if code >> index & 1 else Placement.CPU for index in range(count))
            for num_slots in range(1, 5):
                workload = Workload.of(list(NUMELS[:count]))
                yield UpdatePlan(workload=workload, placements=placements, num_slots=num_slots)


def without_one_wait(schedule: Schedule) -> Iterator[tuple[str, Schedule]]:
    for position, action in enumerate(schedule.actions):
        for name in action.waits:
            mutant = replace(action, waits=tuple(wait for wait in action.waits if wait != name))
            actions = (*schedule.actions[:position], mutant, *schedule.actions[position + 1 :])
            yield f"{action.name} no longer waits for {name}", replace(schedule, actions=actions)


def test_every_missing_wait_is_refused_and_shows_as_a_wrong_number() -> None:
    seen = 0
    for plan in small_plans():
        numels = [sub_group.numel for sub_group in plan.workload.sub_groups]
        expected = serial(numels)
        for what, mutant in without_one_wait(plan.schedule):
            with pytest.raises(ScheduleError, match="may start before"):
                check(mutant, plan.workload)
            with mock.patch.object(executor_module, "check"):
                shown = any(not same(run(mutant, numels, order), expected) for order in ORDERS)
            assert shown, f"{what}: no timing shows it\n{plan.schedule}"
            seen += 1
    assert seen > 300


def test_swapped_dropped_and_repeated_actions_are_refused_or_harmless() -> None:
    """Two actions of different lanes may change places; if the checker lets them, no timing must show it."""
    harmless = 0
    for plan in small_plans():
        actions = plan.schedule.actions
        numels = [sub_group.numel for sub_group in plan.workload.sub_groups]
        for position in range(len(actions) - 1):
            swapped = list(actions)
            swapped[position : position + 2] = reversed(swapped[position : position + 2])
            mutant = replace(plan.schedule, actions=tuple(swapped))
            try:
                check(mutant, plan.workload)
            except ScheduleError:
                continue
            harmless += 1
            if harmless % 40 == 0:
                assert all(same(run(mutant, numels, order), serial(numels)) for order in ORDERS)
        for mutated in (actions[1:], (*actions, actions[-1]), actions[:-1]):
            with pytest.raises(ScheduleError):
                check(replace(plan.schedule, actions=mutated), plan.workload)
    assert harmless > 40


# The fake device itself


def test_work_happens_only_when_somebody_waits_and_pageable_copies_block() -> None:
    device = FakeDevice()
    stream, event = device.stream(), device.event()
    pinned, on_device = device.empty_host(2, torch.float32).fill_(1), device.empty(2, torch.float32)
    assert on_device.isnan().all()
    with stream.issue():
        device.copy(on_device, pinned)
    stream.record(event)
    pinned.fill_(2)
    assert on_device.isnan().all()
    event.synchronize()
    assert on_device.tolist() == [2, 2], "an asynchronous copy reads its source when it runs"
    with stream.issue():
        device.copy(on_device, torch.full((2,), 5.0))
    assert on_device.tolist() == [5, 5], "a copy from pageable memory blocks"


def test_streams_keep_their_order_and_wait_for_events() -> None:
    for order in permutations(range(3)):
        device = FakeDevice(order)
        first, second = device.stream(), device.stream()
        event, end = device.event(), device.event()
        seen: list[str] = []
        with first.issue():
            device.launch(lambda seen=seen: seen.append("a"))
            device.launch(lambda seen=seen: seen.append("b"))
        first.record(event)
        second.wait(event)
        with second.issue():
            device.launch(lambda seen=seen: seen.append("c"))
        second.record(end)
        end.synchronize()
        assert seen == ["a", "b", "c"]


def test_an_event_that_was_never_recorded_holds_nobody_back() -> None:
    device = FakeDevice()
    device.event().synchronize()
    stream, end = device.stream(), device.event()
    stream.wait(device.event())
    stream.record(end)
    end.synchronize()


def test_waiting_for_what_cannot_finish_is_a_deadlock() -> None:
    device = FakeDevice()
    stream, event = device.stream(), device.event()
    stream.queue.add(lambda: None, ready=lambda: False)
    stream.record(event)
    with pytest.raises(Deadlock):
        event.synchronize()


def test_a_failing_kernel_stops_the_update_on_the_fake_device() -> None:
    plan = UpdatePlan(workload=Workload.of([3, 4]), placements=(Placement.CPU, Placement.STREAMED), num_slots=1)
    device = FakeDevice()
    states = pinned_states(device, (3, 4))
    adam = mock.create_autospec(PlainAdam, instance=True)
    adam.update.side_effect = ZeroDivisionError
    executor = Executor(plan.schedule, states, device, adam, LateAdam(device, PlainAdam()), worker=FakeWorker(device))
    with pytest.raises(UpdateFailed):
        executor.run([adam_step(1)] * 2)
