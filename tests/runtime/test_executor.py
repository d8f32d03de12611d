"""Check the executor on the host device: bits, threads, memory, failures and the timeline of an update."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deep_opt_states.device.cpu import HostDevice, HostEvent
from deep_opt_states.device.kernels.adam import AdamTensors
from deep_opt_states.device.kernels.stock import StockAdam
from deep_opt_states.runtime.executor import Executor
from deep_opt_states.runtime.failure import UpdateFailed
from deep_opt_states.runtime.issuer import Issuer
from deep_opt_states.runtime.uninterrupted import Section
from perf_model.schedule.action import ActionKind, Lane
from perf_model.schedule.check import ScheduleError, check
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Workload
from tests.kernels.adam_steps import BETAS, fused
from tests.model.schedule_text import parse_schedule
from tests.model.strategies import plans
from tests.runtime.plain_adam import PlainAdam, adam_step
from tests.runtime.random_states import assert_equal, fill_gradients, make_states, place, update_serially
from tests.runtime.whole_update import run_update

CPU, STREAMED = Placement.CPU, Placement.STREAMED
NUMELS = (40, 1, 33, 128, 7)
MIXED = UpdatePlan(
    workload=Workload.from_numels(list(NUMELS)), placements=(CPU, STREAMED, STREAMED, CPU, STREAMED), num_slots=2
)


@contextmanager
def executor_of(plan: UpdatePlan, states: Any, device: Any = None, adam: Any = None) -> Iterator[Executor]:
    adam, device = adam or PlainAdam(), device or HostDevice()
    place(states, plan.schedule, device)
    executor = Executor(plan.schedule, states, device, adam, adam)
    try:
        yield executor
    finally:
        executor.close()


@pytest.mark.promise("P2")
@given(plans(max_numel=50_000), st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
def test_every_plan_gives_what_a_serial_update_gives(plan: UpdatePlan, dtype: torch.dtype) -> None:
    numels = [unit.numel for unit in plan.workload.units]
    states, reference = make_states(numels, dtype), make_states(numels, dtype)
    with executor_of(plan, states) as executor:
        for step in range(1, 4):
            steps = [adam_step(step)] * len(numels)
            for those in (states, reference):
                fill_gradients(those, step)
            run_update(executor, steps)
            update_serially(reference, PlainAdam(), steps)
            for state, expected in zip(states, reference, strict=True):
                assert torch.equal(state.parts[0].param, expected.parts[0].param)
        executor.sync_states_to_host()
        assert_equal(states, reference)


def test_each_thread_of_an_executor_enters_the_device_before_it_waits_for_events() -> None:
    class Entered(HostDevice):
        """A host device that records the first thing that each thread does."""

        def __init__(self) -> None:
            self.first: dict[int, str] = {}

        def enter_thread(self) -> None:
            self.first.setdefault(threading.get_ident(), "entered")

        def event(self) -> HostEvent:
            return EventOf(self)

    class EventOf(HostEvent):
        def __init__(self, device: Entered) -> None:
            super().__init__()
            self._device = device

        def synchronize(self) -> None:
            self._device.first.setdefault(threading.get_ident(), "waited")

    device = Entered()
    states = make_states(NUMELS, torch.bfloat16)
    fill_gradients(states, 1)
    with executor_of(MIXED, states, device) as executor:
        run_update(executor, [adam_step(1)] * len(NUMELS))
    others = {thread: call for thread, call in device.first.items() if thread != threading.get_ident()}
    assert list(others.values()) == ["entered"] * 2, "the worker, and the thread of the sections"


def test_each_step_is_announced_to_the_kernel_once() -> None:
    adam = PlainAdam()
    states = make_states(NUMELS, torch.bfloat16)
    with executor_of(MIXED, states, adam=adam) as executor:
        fill_gradients(states, 1)
        run_update(executor, [adam_step(1)] * 5)
    assert adam.begun == [(adam_step(1),) * 5]


class MeetingAdam(StockAdam):
    """A kernel in which both threads have scaled their gradients before either begins to update."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.both = threading.Barrier(2, timeout=60)

    def scaled_gradient(self, *args: Any) -> torch.Tensor:
        scaled = super().scaled_gradient(*args)
        self.both.wait()
        return scaled


def test_stocks_op_updates_on_two_threads_at_once() -> None:
    """Check the case of the fallback with a mixed placement on the CPU accelerator."""
    plan = UpdatePlan(workload=Workload.from_numels([128, 128]), placements=(CPU, STREAMED), num_slots=1)
    states, reference = (make_states([128, 128], torch.bfloat16) for _ in range(2))
    together, alone = MeetingAdam(2, BETAS, adamw=True), StockAdam(2, BETAS, adamw=True)
    with executor_of(plan, states, adam=together) as executor:
        for step in range(1, 4):
            for those in (states, reference):
                fill_gradients(those, step)
            run_update(executor, [adam_step(step)] * 2)
            update_serially(reference, alone, [adam_step(step)] * 2)
            assert_equal(states, reference)
    together.close()
    alone.close()


class WatchedPlainAdam(PlainAdam):
    """A kernel that records which thread zeroed states, and which thread updated each sub-group."""

    def __init__(self) -> None:
        super().__init__()
        self.zeroed_by: list[int] = []
        self.updated_by: dict[int, int] = {}

    def zero(self, tensors: AdamTensors) -> None:
        self.zeroed_by.append(threading.get_ident())
        super().zero(tensors)

    def update(self, sub_group: int, *args: Any) -> None:
        self.updated_by[sub_group] = threading.get_ident()
        super().update(sub_group, *args)


def test_states_are_touched_by_the_thread_that_will_update_them() -> None:
    adam = WatchedPlainAdam()
    states, untouched = make_states(NUMELS, torch.bfloat16), make_states(NUMELS, torch.bfloat16)
    for those in (states, untouched):
        fill_gradients(those, 1)
        for state in those:
            state.parts[0].rounded.fill_(1)
    with executor_of(MIXED, states, adam=adam) as executor:
        executor.touch([states[index].parts[0].cpu_update().tensors for index in (0, 3)])
        for index, (state, original) in enumerate(zip(states, untouched, strict=True)):
            for name in ("master", "exp_avg", "exp_avg_sq", "grad", "rounded"):
                before = getattr(original.parts[0], name)
                expected = torch.zeros_like(before) if index in (0, 3) else before
                assert torch.equal(getattr(state.parts[0], name), expected), (name, index)
            assert torch.equal(state.parts[0].param, original.parts[0].param), "the parameters are the model's"
        run_update(executor, [adam_step(1)] * 5)
    assert adam.zeroed_by == [adam.updated_by[0], adam.updated_by[3]]
    assert threading.get_ident() not in adam.zeroed_by


class CountingDevice(HostDevice):
    """A host device that records each reservation."""

    def __init__(self) -> None:
        self.reserved: list[str] = []

    def stream(self) -> Any:
        self.reserved.append("stream")
        return super().stream()

    def event(self) -> Any:
        self.reserved.append("event")
        return super().event()

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        self.reserved.append(f"empty {numel}")
        return super().empty(numel, dtype)

    def empty_host(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        self.reserved.append("empty_host")
        return super().empty_host(numel, dtype)


class Allocations(TorchDispatchMode):
    """A mode that records every torch operation whose result has memory that no argument has."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))

        def storages(tree: Any) -> set[int]:
            return {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)}

        self.seen += 1
        if not storages(result) <= storages((args, kwargs)):
            self.found.append(str(func))
        return result


def test_a_step_reserves_nothing_and_allocates_nothing() -> None:
    """Check that neither the thread that issues nor the worker reserves memory, a stream or an event in a step."""
    device = CountingDevice()
    states = make_states(NUMELS, torch.bfloat16)
    in_sections, on_worker = Allocations(), Allocations()
    threads: dict[str, int] = {}

    def watched(method: Callable[..., Any], watch: Allocations) -> Callable[..., Any]:
        def watched_method(*args: Any) -> Any:
            threads[method.__name__] = threading.get_ident()
            with watch:
                return method(*args)

        return watched_method

    with executor_of(MIXED, states, device, fused()) as executor:
        slots = [entry for entry in device.reserved if entry.startswith("empty")]
        assert slots == ["empty 33"] * 3 * 2
        assert device.reserved.count("stream") == sum(not lane.is_thread for lane in Lane)
        device.reserved.clear()
        with (
            mock.patch.object(Issuer, "on_thread", watched(Issuer.on_thread, on_worker)),
            mock.patch.object(Section, "__call__", watched(Section.__call__, in_sections)),
        ):
            for step in range(1, 4):
                for state in states:
                    state.parts[0].grad.fill_(1)
                run_update(executor, [adam_step(step)] * 5)
    assert in_sections.found == on_worker.found == []
    assert device.reserved == []
    assert in_sections.seen > 0
    assert len({threading.get_ident(), *threads.values()}) == 3


def test_the_allocation_watch_sees_an_allocation() -> None:
    watch = Allocations()
    with watch:
        torch.ones(3).add_(1)
        torch.ones(3) + 1
    assert len(watch.found) >= 3


def test_an_unsafe_schedule_is_refused_before_anything_is_reserved() -> None:
    actions = tuple(replace(action, waits=()) for action in MIXED.schedule.actions)
    device = CountingDevice()
    with pytest.raises(ScheduleError, match="may start before") as caught:
        Executor(
            replace(MIXED.schedule, actions=actions),
            make_states(NUMELS, torch.bfloat16),
            device,
            PlainAdam(),
            PlainAdam(),
        )
    assert any(line.startswith(">") for line in str(caught.value).splitlines())
    assert device.reserved == []


@pytest.mark.parametrize(
    "text",
    [
        # The wait for CPU_STEP 0 is implied, since the worker has ended it before CPU_STEP 1.
        "CPU_STEP 0\nCPU_STEP 1\nPUBLISH 1 after CPU_STEP 1\nPUBLISH 0",
        "CPU_STEP 0\nPUBLISH 0 after CPU_STEP 0\nGPU_STEP 1 after CPU_STEP 0",
        "CPU_STEP 0\nPUBLISH 0 after CPU_STEP 0\nGPU_STEP 1 after PUBLISH 0",
    ],
)
def test_a_safe_schedule_that_no_stream_can_execute_is_refused(text: str) -> None:
    schedule = parse_schedule(text, num_slots=0, slot_numel=0)
    states = make_states([4, 4], torch.bfloat16)
    for state, placement in zip(states, check(schedule, Workload.from_numels([4, 4])), strict=True):
        state.placement = placement
    device = CountingDevice()
    with pytest.raises(ScheduleError, match="no other action waits for a CPU unit"):
        Executor(schedule, states, device, PlainAdam(), PlainAdam())
    assert device.reserved == []


class FailingAdam(PlainAdam):
    """A kernel that raises when it updates the sub-group ``victim``."""

    def __init__(self, victim: int) -> None:
        super().__init__()
        self.victim: int | None = victim
        self.updated: list[int] = []

    def update(self, sub_group: int, *args: Any) -> None:
        if sub_group == self.victim:
            raise ZeroDivisionError(f"sub-group {sub_group}")
        self.updated.append(sub_group)
        super().update(sub_group, *args)


@pytest.mark.promise("P6")
@pytest.mark.parametrize("victim", [0, 1, 3, 4])
def test_a_failure_on_any_lane_stops_the_update_and_is_remembered(victim: int) -> None:
    states = make_states(NUMELS, torch.bfloat16)
    adam = FailingAdam(victim)
    with executor_of(MIXED, states, adam=adam) as executor:
        fill_gradients(states, 1)
        with pytest.raises(UpdateFailed, match=f"ZeroDivisionError: sub-group {victim}") as caught:
            run_update(executor, [adam_step(1)] * 5)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        assert victim != 0 or 3 not in adam.updated, "the worker started another action"
        assert "update" in [frame.name for frame in traceback_of(caught.value.__cause__)]
        updated = list(adam.updated)
        with pytest.raises(UpdateFailed):
            run_update(executor, [adam_step(2)] * 5)
        assert adam.updated == updated, "inconsistent states were updated"
        adam.victim = None
        executor.clear_failure()
        run_update(executor, [adam_step(2)] * 5)
        assert sorted(adam.updated[len(updated) :]) == [0, 1, 2, 3, 4]


def test_a_failed_cpu_step_is_known_as_soon_as_its_parameters_are_needed() -> None:
    states = make_states(NUMELS, torch.bfloat16)
    with executor_of(MIXED, states, adam=FailingAdam(0)) as executor:
        fill_gradients(states, 1)
        executor.begin([adam_step(1)] * 5)
        executor.publish(0)
        assert isinstance(executor.failure, ZeroDivisionError)
        executor.end()


def traceback_of(error: BaseException) -> list[Any]:
    import traceback

    return traceback.extract_tb(error.__traceback__)


def test_the_timeline_has_every_action_and_lanes_run_in_order() -> None:
    states = make_states([20_000] * 5, torch.bfloat16)
    plan = UpdatePlan(workload=Workload.from_numels([20_000] * 5), placements=MIXED.placements, num_slots=2)
    with executor_of(plan, states) as executor:
        fill_gradients(states, 1)
        run_update(executor, [adam_step(1)] * 5)
        timeline = executor.timeline_reader()()
    assert tuple(span.action for span in timeline.spans) == plan.schedule.actions
    ends = {}
    for span in timeline.spans:
        assert 0 <= span.start_s < span.end_s
        assert span.start_s >= ends.get(span.action.lane, 0.0)
        ends[span.action.lane] = span.end_s
        for name in span.action.waits:
            producer = next(other for other in timeline.spans if other.action.name == name)
            assert producer.end_s <= span.start_s
    assert timeline.busy_s(Lane.CPU) > 0
    assert ActionKind.PUBLISH in {span.action.kind for span in timeline.spans}
