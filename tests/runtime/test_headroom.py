"""Check that slots are added where memory is free, removed when it becomes scarce, and that the bits stay the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deep_opt_states.runtime.headroom import OBSERVED_STEPS, Headroom
from perf_model.schedule.check import ScheduleError
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Workload
from tests.fake_device.device import FakeDevice
from tests.fake_device.timing import Late
from tests.runtime.hostile import hostile_executor, pinned_states
from tests.runtime.plain_adam import PlainAdam, adam_step
from tests.runtime.random_states import assert_equal, fill_gradients, make_states, update_serially

CPU, STREAMED = Placement.CPU, Placement.STREAMED
NUMELS = [9, 7, 8, 6, 5]
PLAN = UpdatePlan(
    workload=Workload.from_numels(NUMELS), placements=(STREAMED, CPU, STREAMED, STREAMED, STREAMED), num_slots=1
)


def headroom(max_slots: int = 10) -> Headroom:
    return Headroom(slot_bytes=100, margin_bytes=50, max_slots=max_slots)


def observed(free: list[int], max_slots: int = 10, retries: dict[int, int] | None = None) -> list[int]:
    """Return the added slots after each step.

    ``free`` has the bytes that training leaves free at the peak of each step, without the slots. ``retries`` has the
    number of retried allocations by the step from which it holds.
    """
    tracker, slots, num_retries, max_held, least = headroom(max_slots), [], 0, 0, 10**9
    for step, free_bytes in enumerate(free):
        num_retries = (retries or {}).get(step, num_retries)
        max_held = max(max_held, tracker.slots)
        # The peak of PyTorch's memory never falls.
        least = min(least, free_bytes)
        tracker.observe(least - max_held * 100, num_retries)
        slots.append(tracker.slots)
    return slots


def test_no_slots_in_the_first_steps_and_then_as_many_as_leave_the_margin_free() -> None:
    assert observed([1000, 480, 1000, 1000, 1000]) == [0, 0, 0, 4, 4]
    assert OBSERVED_STEPS == 3
    assert observed([1000] * 4, max_slots=3)[-1] == 3
    assert observed([149] * 4)[-1] == 0
    assert observed([150] * 4)[-1] == 1
    assert observed([10] * 4)[-1] == 0


def test_memory_for_a_longer_sequence_is_freed_and_not_taken_again() -> None:
    assert observed([480] * 4 + [260, 480, 480]) == [0, 0, 0, 4, 2, 2, 2]


def test_retried_allocation_halves_the_added_slots() -> None:
    assert observed([480] * 8, retries={1: 3, 5: 4, 7: 5}) == [0, 0, 0, 4, 4, 2, 2, 1]


def test_no_slot_is_added_after_a_failed_allocation() -> None:
    tracker = headroom()
    for _ in range(5):
        tracker.observe(480, 0)
    tracker.add_no_more()
    tracker.observe(10_000, 0)
    assert tracker.slots == 0


@given(st.lists(st.integers(0, 2000), min_size=4, max_size=20), st.integers(0, 8))
def test_margin_stays_free_in_every_step(free: list[int], max_slots: int) -> None:
    slots = observed(free, max_slots)
    for step, held in enumerate(slots):
        assert 0 <= held <= max_slots
        assert held == 0 or min(free[: step + 1]) - held * 100 >= 50


def test_slots_come_and_go_between_updates_and_bits_stay() -> None:
    device = FakeDevice(Late())
    states = pinned_states(device, NUMELS, torch.bfloat16)
    reference = make_states(NUMELS, torch.bfloat16)
    without = device.allocated_bytes
    executor = hostile_executor(PLAN.schedule, states, device)
    for step, num_slots in enumerate((1, 3, 4, 2, 1), start=1):
        schedule = replace(PLAN, num_slots=num_slots).schedule
        executor.set_schedule(schedule)
        assert device.allocated_bytes - without == schedule.staging_bytes
        for those in (states, reference):
            fill_gradients(those, step)
        executor.prefetch()
        executor.run([adam_step(step)] * len(NUMELS))
        update_serially(reference, PlainAdam(), [adam_step(step)] * len(NUMELS))
        assert_equal(states, reference)


def test_schedule_that_does_not_fit_in_memory_changes_nothing() -> None:
    class Full(FakeDevice):
        full = False

        def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
            if self.full:
                raise torch.OutOfMemoryError
            return super().empty(numel, dtype)

    device = Full()
    states = pinned_states(device, NUMELS, torch.bfloat16)
    reference = make_states(NUMELS, torch.bfloat16)
    executor = hostile_executor(PLAN.schedule, states, device)
    device.full = True
    with pytest.raises(torch.OutOfMemoryError):
        executor.set_schedule(replace(PLAN, num_slots=2).schedule)
    with pytest.raises(ScheduleError):
        executor.set_schedule(replace(PLAN.schedule, actions=PLAN.schedule.actions[1:]))
    for those in (states, reference):
        fill_gradients(those, 1)
    executor.run([adam_step(1)] * len(NUMELS))
    update_serially(reference, PlainAdam(), [adam_step(1)] * len(NUMELS))
    assert_equal(states, reference)
