"""Check the executor on the host device: threads, memory, refusals, failures and the timeline of an update."""

from __future__ import annotations

import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deep_opt_states.device.cpu import HostDevice
from deep_opt_states.device.kernels.adam import AdamTensors
from deep_opt_states.device.kernels.stock import StockAdam
from deep_opt_states.runtime.executor import Executor
from deep_opt_states.runtime.failure import UpdateFailed
from deep_opt_states.runtime.issuer import Issuer
from deep_opt_states.runtime.uninterrupted import Section
from deep_opt_states.runtime.worker import Worker
from deep_opt_states.zero.step.staging import Staging
from perf_model.prediction.memory import NUM_STAGING_BUFFERS
from perf_model.schedule.action import Lane
from perf_model.schedule.check import ScheduleError, check
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Workload
from tests.kernels.adam_steps import BETAS, fused
from tests.model.strategies import parse_schedule
from tests.runtime.plain_adam import PlainAdam, adam_step
from tests.runtime.random_states import assert_equal, fill_gradients, make_states, place, run_update, update_serially

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


# Threads


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


def test_states_are_touched_by_the_thread_that_updates_them_and_each_thread_enters_the_device() -> None:
    device, adam = HostDevice(), WatchedPlainAdam()
    states, untouched = make_states(NUMELS, torch.bfloat16), make_states(NUMELS, torch.bfloat16)
    for those in (states, untouched):
        fill_gradients(those, 1)
    entered: list[int] = []
    device.enter_thread = lambda: entered.append(threading.get_ident())  # type: ignore[method-assign]
    with executor_of(MIXED, states, device, adam) as executor:
        executor.touch([states[index].parts[0].cpu_update().tensors for index in (0, 3)])
        for index, (state, original) in enumerate(zip(states, untouched, strict=True)):
            for name in ("master", "exp_avg", "exp_avg_sq", "grad", "param"):
                before = getattr(original.parts[0], name)
                expected = torch.zeros_like(before) if index in (0, 3) and name != "param" else before
                assert torch.equal(getattr(state.parts[0], name), expected), (name, index)
        run_update(executor, [adam_step(1)] * 5)
    assert adam.begun == [(adam_step(1),) * 5], "each step is announced once"
    assert adam.zeroed_by == [adam.updated_by[0], adam.updated_by[3]]
    assert adam.updated_by[0] in entered
    assert len(set(entered) - {threading.get_ident()}) == 2, "the worker, and the thread of the sections"


class MeetingAdam(StockAdam):
    """A kernel in which both threads have scaled their gradients before either begins to update."""

    both = threading.Barrier(2, timeout=60)

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
        for those in (states, reference):
            fill_gradients(those, 1)
        run_update(executor, [adam_step(1)] * 2)
        update_serially(reference, alone, [adam_step(1)] * 2)
        assert_equal(states, reference)
    memory = weakref.ref(alone.scaled_gradient(torch.ones(8), 0.5, torch.float32)._base)
    assert memory() is not None
    alone.close()
    assert memory() is None


def test_a_worker_raises_in_its_constructor_and_runs_tasks_in_the_caller_after_it_is_closed() -> None:
    """Check the order in which the garbage collector ends an engine: the thread first, and then its update."""
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        Worker(mock.Mock(side_effect=RuntimeError("CUDA error: invalid device ordinal")))
    worker = Worker()
    worker.close()
    assert worker.submit(threading.current_thread).exception() is None
    with pytest.raises(ZeroDivisionError):
        worker.submit(lambda: 1 // 0).result(timeout=10)


# Memory


class CountingDevice(HostDevice):
    """A host device that records each reservation."""

    def __init__(self) -> None:
        self.reserved: list[str] = []
        for name in ("stream", "event", "empty", "empty_host"):
            setattr(self, name, partial(self._counted, name, getattr(self, name)))

    def _counted(self, name: str, reserve: Callable[..., Any], *arguments: Any) -> Any:
        self.reserved.append(" ".join([name, *map(str, arguments[:1])]))
        return reserve(*arguments)


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
        assert [entry for entry in device.reserved if entry.startswith("empty")] == ["empty 33"] * 3 * 2, "slots"
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
    assert in_sections.found == on_worker.found == device.reserved == []
    assert in_sections.seen > 0
    assert len({threading.get_ident(), *threads.values()}) == 3
    with in_sections:
        torch.ones(3) + 1
    assert len(in_sections.found) >= 2, "the watch sees an allocation"


def test_sending_and_adding_reserve_and_allocate_nothing() -> None:
    device = CountingDevice()
    staging = Staging(device, 7, torch.bfloat16)
    assert device.reserved.count("empty 7") == NUM_STAGING_BUFFERS
    host, gradient = torch.zeros(100, dtype=torch.bfloat16), torch.ones(100, dtype=torch.bfloat16)
    device.reserved.clear()
    with Allocations() as allocations:
        staging.send(host, 0, gradient[:50])
        staging.send(host, 50, gradient[50:])
        staging.flush()
        staging.wait_for_copies()
        staging.add_to(gradient, host)
    assert device.reserved == allocations.found == []
    assert allocations.seen > 0
    assert gradient.tolist() == [2] * 100
    assert host.tolist() == [1] * 100


# Refusals


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("CPU_STEP 0\nPUBLISH 0 after CPU_STEP 0\nGPU_STEP 1\nCPU_STEP 2\nPUBLISH 2", "may start before"),
        # The wait for CPU_STEP 0 is implied, since the worker has ended it before CPU_STEP 1.
        ("CPU_STEP 0\nCPU_STEP 1\nPUBLISH 1 after CPU_STEP 1\nPUBLISH 0", "no other action waits for a CPU unit"),
        ("CPU_STEP 0\nPUBLISH 0 after CPU_STEP 0\nGPU_STEP 1 after CPU_STEP 0", "no other action waits for a CPU unit"),
        ("CPU_STEP 0\nPUBLISH 0 after CPU_STEP 0\nGPU_STEP 1 after PUBLISH 0", "no other action waits for a CPU unit"),
    ],
    ids=["unsafe", "implied", "after a CPU step", "after a publication"],
)
def test_a_schedule_that_is_unsafe_or_no_stream_can_execute_is_refused_before_anything_is_reserved(
    text: str, message: str
) -> None:
    schedule = parse_schedule(text, num_slots=0, slot_numel=0)
    states = make_states([4] * (1 + max(action.unit for action in schedule.actions)), torch.bfloat16)
    place(states, schedule, HostDevice())
    device = CountingDevice()
    if message != "may start before":
        check(schedule, Workload.from_numels([4, 4]))
    with pytest.raises(ScheduleError, match=message) as caught:
        Executor(schedule, states, device, PlainAdam(), PlainAdam())
    assert any(line.startswith(">") for line in str(caught.value).splitlines()), "the action is marked in the grid"
    assert device.reserved == []


# Failures


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


@pytest.mark.P6
@pytest.mark.parametrize("victim", [0, 1, 3, 4])
def test_a_failure_on_any_lane_stops_the_update_and_is_remembered(victim: int) -> None:
    states = make_states(NUMELS, torch.bfloat16)
    adam = FailingAdam(victim)
    with executor_of(MIXED, states, adam=adam) as executor:
        fill_gradients(states, 1)
        executor.begin([adam_step(1)] * 5)
        executor.publish(0)
        assert victim != 0 or isinstance(executor.failure, ZeroDivisionError), "known where parameters are needed"
        executor.end()
        with pytest.raises(UpdateFailed, match=f"ZeroDivisionError: sub-group {victim}") as caught:
            run_update(executor, [adam_step(1)] * 5)
        cause = caught.value.__cause__
        assert isinstance(cause, ZeroDivisionError)
        assert victim != 0 or 3 not in adam.updated, "the worker started another action"
        assert "update" in [frame.name for frame in traceback.extract_tb(cause.__traceback__)]
        updated = list(adam.updated)
        with pytest.raises(UpdateFailed):
            run_update(executor, [adam_step(2)] * 5)
        assert adam.updated == updated, "inconsistent states were updated"
        adam.victim = None
        executor.clear_failure()
        run_update(executor, [adam_step(2)] * 5)
        assert sorted(adam.updated[len(updated) :]) == [0, 1, 2, 3, 4]
