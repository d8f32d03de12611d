"""Check that each wait of the executor can be interrupted and repeated without changing the bits of the update."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any
from unittest import mock

import pytest

from deep_opt_states.device.cpu import HostDevice
from deep_opt_states.device.kernels.adam import RangeUpdate
from deep_opt_states.runtime import uninterrupted, worker
from deep_opt_states.runtime.uninterrupted import Section, Uninterrupted
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Workload
from tests.forked_child import alarm_after
from tests.kernels.intercepted import before_each_update
from tests.runtime.moving import Model, MovingIteration, MovingTraining, train_serially
from tests.runtime.plain_adam import adam_step
from tests.runtime.random_states import same

MODEL = Model(numels=(9, 7, 8, 6, 5), persistent=[])
CPU, STREAMED, RESIDENT = Placement.CPU, Placement.STREAMED, Placement.RESIDENT
PLAN = UpdatePlan(
    workload=Workload.from_numels(list(MODEL.numels)), placements=(CPU, STREAMED, RESIDENT, STREAMED, CPU), num_slots=1
)


class Interrupt(Exception):
    """The exception of a signal handler."""


class EachInstruction:
    """A trace function that raises ``Interrupt`` before instruction number ``position`` of two files, on one thread."""

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
    with suppress(Interrupt):
        try:
            call()
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


def test_a_section_runs_once_and_the_call_raises_its_exception() -> None:
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


@pytest.mark.parametrize("fails", [False, True])
def test_a_signal_handler_may_end_the_update_that_the_host_waits_for_or_interrupt_the_wait(fails: bool) -> None:
    """Check the habit to save a checkpoint in the handler of a signal that announces the end of a job."""
    training = MovingTraining(MODEL, PLAN, HostDevice())
    executor, expected = training.executor, train_serially(MODEL, [MovingIteration(plan=PLAN)])

    def slowly(update: RangeUpdate) -> None:
        # The interpreter runs signal handlers meanwhile.
        time.sleep(0.1 if update.sub_group == 4 else 0.002)
        if fails and update.sub_group == 4:
            raise ZeroDivisionError

    def save(*_: object) -> None:
        executor.end()
        executor.sync_states_to_host()
        assert fails or same(training.states, expected[-len(training.states) :])
        raise Interrupt

    with before_each_update(slowly):
        training.backward(0)
        executor.begin([adam_step(1)] * len(MODEL.numels))
        with pytest.raises(Interrupt), alarm_after(0.01, save):
            executor.end()
    assert isinstance(executor.failure, ZeroDivisionError) == fails
    executor.close()
