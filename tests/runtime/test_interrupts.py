"""Check that each wait of the executor can be interrupted and repeated, with the bits of an uninterrupted update."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from deep_opt_states.device.cpu import HostDevice
from deep_opt_states.runtime import uninterrupted, worker
from deep_opt_states.runtime.executor import Executor, Waiter
from deep_opt_states.runtime.failure import UpdateFailed
from deep_opt_states.runtime.state import UnitState
from deep_opt_states.runtime.uninterrupted import Section, Uninterrupted
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Workload
from tests.alarm import alarm_after
from tests.fake_device.timing import Seeded, Timing, late_lanes
from tests.runtime import deferred
from tests.runtime.deferred import Habits, serial
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
from tests.runtime.test_deferred import PERSISTENT, PLAN, THREE_IN_TWO_SLOTS
from tests.runtime.whole_update import run_update


class Interrupt(Exception):
    """The exception of a signal handler."""


METHODS = (
    "prefetch",
    "sync_states_to_host",
    "advance",
    "publish",
    "end",
)
"""The methods that may be called again after an interrupt, whatever they have done so far."""


class RepeatingExecutor(Executor):
    """An executor whose caller repeats each call that is interrupted."""

    def begin(self, *args: Any) -> None:
        try:
            super().begin(*args)
        except Interrupt:
            # The update has begun as a whole, or not at all.
            if not repeated(lambda: self.pending):
                self.begin(*args)


def repeated(call: Callable[[], Any]) -> Any:
    while True:
        try:
            return call()
        except Interrupt:
            pass


def repeating(method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: repeated(lambda: method(*args))


for name in METHODS:
    setattr(RepeatingExecutor, name, repeating(getattr(Executor, name)))


@contextmanager
def interrupted_waits(chance: Callable[[], float]) -> Iterator[list[str]]:
    """Raise ``Interrupt`` in the waits for sections, before or after the section has ended. Yield the moments."""
    found: list[str] = []
    wait_for_end = Section.wait_for_end

    def interrupted(self: Section[Any], *args: Any) -> bool:
        number = chance()
        if number < 0.2:
            found.append("before")
            raise Interrupt
        ended = wait_for_end(self, *args)
        if number < 0.4:
            found.append("after")
            raise Interrupt
        return ended

    with mock.patch.object(Section, "wait_for_end", interrupted):
        yield found


@pytest.mark.promise("P1")
@given(st.integers(0, 2**32), st.sampled_from([PLAN, THREE_IN_TWO_SLOTS]))
def test_interrupted_and_repeated_waits_give_the_serial_bits_whatever_the_timing(seed: int, plan: UpdatePlan) -> None:
    chance = random.Random(seed)
    timing: Timing = chance.choice([*late_lanes(7), Seeded(seed)])
    habits = Habits(seed=seed, persistent=PERSISTENT if chance.random() < 0.5 else [[]] * 5, writes=seed % 2 == 0)
    with mock.patch.object(deferred, "Executor", RepeatingExecutor), interrupted_waits(chance.random) as found:
        read = deferred.deferred(plan, timing, habits)
    assert same(read, serial(plan, habits))
    assume(found)


# Every instruction of the wait


class EachInstruction:
    """A trace function that raises ``Interrupt`` before instruction number ``position`` of two files, on one thread.

    A signal handler runs before some of them.
    """

    def __init__(self, position: int) -> None:
        self._left = position
        self._files = (uninterrupted.__file__, worker.__file__)
        self.raised = False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in self._files:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self._left -= 1
            if self._left < 0:
                self.raised = True
                raise Interrupt
        return self


def interrupted_at(position: int, call: Callable[[], object]) -> bool:
    """Call ``call``, interrupted before instruction ``position``. Return whether it has so many instructions."""
    trace, previous = EachInstruction(position), sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except Interrupt:
        pass
    finally:
        sys.settrace(previous)
    return trace.raised


@pytest.mark.parametrize("first", ["section", "interrupted section"])
def test_an_interrupt_before_any_instruction_of_the_wait_leaves_a_whole_section_or_none(first: str) -> None:
    running = Uninterrupted(HostDevice())
    steps: list[str] = []

    def section() -> None:
        steps.append("begin")
        # The interrupt that ends the wait for it, and the next call, come in between.
        released.wait(0.01)
        steps.append("end")

    for position in range(10_000):
        steps.clear()
        released = threading.Event()
        if first == "interrupted section":
            # The instruction is one of the wait for it at the next call.
            with pytest.raises(Interrupt), mock.patch.object(Section, "wait_for_end", side_effect=Interrupt):
                running.run(section)
        was_interrupted = interrupted_at(position, lambda: running.run(section))
        released.set()
        once = ["begin", "end"]
        whole = [once, once * 2] if first == "interrupted section" else [[], once]
        assert running.run(lambda: list(steps)) in whole, position
        assert running.settle()
        if not was_interrupted:
            break
    assert position > 100, "the instructions of the wait were not traced"
    running.close()


def test_a_section_runs_once_and_its_exception_is_that_of_the_call() -> None:
    running = Uninterrupted(HostDevice())
    calls: list[int] = []
    assert running.run(lambda: calls.append(1) or 7) == 7
    with pytest.raises(ZeroDivisionError):
        running.run(lambda: 1 // 0)
    assert running.run(lambda: running.run(lambda: threading.current_thread().name)) == uninterrupted.THREAD_NAME
    other: list[str] = []
    thread = threading.Thread(target=lambda: other.append(running.run(lambda: threading.current_thread().name)))
    thread.start()
    thread.join()
    assert other == [thread.name], "no signal handler runs there"
    running.close()
    assert running.run(lambda: threading.current_thread()) is threading.main_thread()
    assert calls == [1]


def test_the_memory_of_a_section_that_fails_is_free_after_its_exception() -> None:
    running = Uninterrupted(HostDevice())
    freed = threading.Event()

    class InterruptedMemory:
        def __del__(self) -> None:
            freed.set()

    def section() -> None:
        memory = InterruptedMemory()
        raise MemoryError(len(str(memory)))

    with pytest.raises(MemoryError):
        running.run(section)
    assert freed.wait(10), "a cycle of references keeps it"
    running.close()


# Real signals


class SlowAdam(PlainAdam):
    """A kernel that takes its time, in which the interpreter runs signal handlers."""

    def update(self, *args: Any) -> None:
        time.sleep(0.002)
        super().update(*args)


NUMELS = (9, 7, 8, 6, 5)


@contextmanager
def slow_executor() -> Iterator[tuple[Executor, list[UnitState], list[UnitState]]]:
    """Yield an executor with slow updates in all lanes, the sub-groups, and equal ones that are updated serially."""
    whole, reference = (make_states(NUMELS, torch.bfloat16) for _ in range(2))
    plan = with_persistent(PLAN, PERSISTENT)
    states = cut(whole, plan.workload, HostDevice())
    place(states, plan.schedule, HostDevice())
    executor = Executor(plan.schedule, states, HostDevice(), SlowAdam(), SlowAdam())
    try:
        yield executor, whole, reference
    finally:
        executor.close()


def raise_interrupt(*_: object) -> None:
    raise Interrupt


def update_once(executor: Executor, step: int) -> None:
    executor.prefetch()
    executor.begin([adam_step(step)] * len(NUMELS))
    for unit in executor._issuer.schedule.publishing:
        executor.publish(unit)
    executor.end(Waiter.STREAM)
    executor.sync_states_to_host()


def test_an_interrupt_at_a_random_moment_of_an_update_leaves_it_in_flight_or_not_begun() -> None:
    chance = random.Random(5)
    interrupted = begun = 0
    with slow_executor() as (executor, states, reference):
        for step in range(1, 61):
            for those in (states, reference):
                fill_gradients(those, step)
            try:
                with alarm_after(chance.uniform(0.0005, 0.03), raise_interrupt):
                    update_once(executor, step)
            except Interrupt:
                interrupted += 1
                executor.end()
                executor.sync_states_to_host()
            assert executor.failure is None
            has_begun = len(executor._host_adam.begun) > begun  # type: ignore[attr-defined]
            begun += has_begun
            if has_begun:
                update_serially(reference, PlainAdam(), [adam_step(step)] * len(NUMELS))
            assert_equal(states, reference)
    assert interrupted > 10


def test_a_signal_handler_may_end_the_update_that_the_host_waits_for() -> None:
    """Check the habit to save a checkpoint in the handler of a signal that announces the end of a job."""
    found: list[bool] = []
    with slow_executor() as (executor, states, reference):

        def save(*_: object) -> None:
            executor.end()
            executor.sync_states_to_host()
            found.append(same(tensors_of(states, ["master"]), tensors_of(reference, ["master"])))

        for those in (states, reference):
            fill_gradients(those, 1)
        update_serially(reference, PlainAdam(), [adam_step(1)] * len(NUMELS))
        executor.begin([adam_step(1)] * len(NUMELS))
        with alarm_after(0.001, save):
            executor.end()
        executor.sync_states_to_host()
        assert found == [True]
        assert_equal(states, reference)


def test_an_interrupt_while_the_host_waits_for_a_failing_update_hides_no_failure() -> None:
    class AdamThatFailsLate(SlowAdam):
        def update(self, sub_group: int, *args: Any) -> None:
            super().update(sub_group, *args)
            if sub_group == 4:
                raise ZeroDivisionError

    states = make_states(NUMELS, torch.bfloat16)
    place(states, PLAN.schedule, HostDevice())
    executor = Executor(PLAN.schedule, states, HostDevice(), AdamThatFailsLate(), SlowAdam())
    fill_gradients(states, 1)
    executor.begin([adam_step(1)] * len(NUMELS))
    with pytest.raises(Interrupt), alarm_after(0.001, raise_interrupt):
        executor.end()
    assert isinstance(executor.failure, ZeroDivisionError)
    with pytest.raises(UpdateFailed, match="ZeroDivisionError"):
        run_update(executor, [adam_step(2)] * len(NUMELS))
    executor.close()


def test_an_update_that_an_interrupt_has_left_running_is_awaited_only_for_a_time_at_exit() -> None:
    released = threading.Event()

    class HangingAdam(PlainAdam):
        def update(self, *args: Any) -> None:
            released.wait(60)

    states = make_states([20], torch.bfloat16)
    schedule = UpdatePlan(workload=Workload.from_numels([20]), placements=(Placement.CPU,), num_slots=1).schedule
    executor = Executor(schedule, states, HostDevice(), HangingAdam(), None)
    fill_gradients(states, 1)
    executor.begin([adam_step(1)])
    with pytest.raises(Interrupt), alarm_after(0.05, raise_interrupt):
        executor.end()
    assert not executor.failed_within(0.05)
    released.set()
    executor.end()
    executor.close()
