"""Check the executor on the host device: threads, memory, refusals and failures."""

from __future__ import annotations

import threading
import traceback
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deep_opt_states.device.cpu import HostDevice
from deep_opt_states.device.kernels.adam import AdamTensors, RangeUpdate
from deep_opt_states.device.kernels.stock import StockAdam
from deep_opt_states.runtime.executor import Executor
from deep_opt_states.runtime.failure import UpdateFailed
from deep_opt_states.runtime.issuer import Issuer
from deep_opt_states.runtime.uninterrupted import Section
from deep_opt_states.runtime.worker import Worker
from deep_opt_states.zero.step.staging import Staging
from perf_model.schedule.action import ActionKind
from perf_model.schedule.check import ScheduleError, check
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import STATES, Workload
from tests.kernels.adam_steps import BETAS, fused
from tests.kernels.intercepted import before_each_update
from tests.model.strategies import parse_schedule
from tests.runtime.moving import Model, MovingIteration, MovingTraining, train_serially
from tests.runtime.plain_adam import adam_step
from tests.runtime.random_states import run_update, same

CPU, STREAMED, RESIDENT = Placement.CPU, Placement.STREAMED, Placement.RESIDENT
MODEL = Model(numels=(40, 1, 33, 128, 7), persistent=[])
MIXED = UpdatePlan(
    workload=Workload.from_numels(list(MODEL.numels)),
    placements=(CPU, STREAMED, STREAMED, CPU, STREAMED),
    num_slots=2,
)


def test_states_are_touched_by_the_thread_that_updates_them_and_each_thread_enters_the_device() -> None:
    device, zeroed_by, updated_by, entered = HostDevice(), list[int](), dict[int, int](), list[int]()
    adam = fused()

    def zero(tensors: AdamTensors, original: Callable[..., None] = adam.zero) -> None:
        zeroed_by.append(threading.get_ident())
        original(tensors)

    def note(update: RangeUpdate) -> None:
        updated_by[update.sub_group] = threading.get_ident()

    device.enter_thread = lambda: entered.append(threading.get_ident())  # type: ignore[method-assign]
    training = MovingTraining(MODEL, MIXED, device, adam=adam)
    before, sub_groups = training.states, training.memory.sub_groups
    with mock.patch.object(adam, "zero", zero), mock.patch.object(adam, "begin_step", wraps=adam.begin_step) as begin:
        training.executor.touch([sub_groups[index] for index in (0, 3)])
        for number, (tensor, original) in enumerate(zip(training.states, before, strict=True)):
            is_zero = number // len(STATES) in (0, 3)
            assert torch.equal(tensor, torch.zeros_like(tensor) if is_zero else original), number
        with before_each_update(note):
            run_update(training.executor, [adam_step(1)] * 5)
    training.end()
    assert begin.call_count == 1, "each step is announced once"
    assert zeroed_by == [updated_by[0], updated_by[3]]
    assert updated_by[0] in entered
    assert len(set(entered) - {threading.get_ident()}) == 2, "the worker, and the thread of the sections"


def test_stocks_op_updates_on_two_threads_at_the_same_time() -> None:
    """Check the fallback with a mixed placement: both threads have scaled their gradients before either updates."""
    both = threading.Barrier(2, timeout=60)

    class MeetingAdam(StockAdam):
        def scaled_gradient(self, *args: Any) -> torch.Tensor:
            scaled = super().scaled_gradient(*args)
            both.wait()
            return scaled

    model = Model(numels=(128, 128), persistent=[])
    plan = UpdatePlan(workload=Workload.from_numels([128, 128]), placements=(CPU, STREAMED), num_slots=1)
    training = MovingTraining(model, plan, HostDevice(), adam=MeetingAdam(2, BETAS, adamw=True))
    iterations = [MovingIteration(plan=plan)]
    assert same(training.train(iterations), train_serially(model, iterations))
    alone = StockAdam(2, BETAS, adamw=True)
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

    def watched(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def watched_method(*args: Any) -> Any:
            with self:
                return method(*args)

        return watched_method


def test_a_step_reserves_nothing_and_allocates_nothing() -> None:
    """Check that no thread reserves memory, a stream or an event in a step, nor when gradients are sent or added."""
    device, issuing, on_worker, sending = HostDevice(), Allocations(), Allocations(), Allocations()
    training = MovingTraining(MODEL, MIXED, device)
    staging = Staging(device, 7, torch.bfloat16)
    host, gradient = torch.zeros(100, dtype=torch.bfloat16), torch.ones(100, dtype=torch.bfloat16)
    training.backward(0)
    refused = dict.fromkeys(("stream", "event", "empty", "empty_host"), mock.Mock(side_effect=AssertionError))
    with (
        mock.patch.multiple(device, **refused),
        mock.patch.object(Issuer, "on_thread", on_worker.watched(Issuer.on_thread)),
        mock.patch.object(Section, "__call__", issuing.watched(Section.__call__)),
    ):
        for step in range(1, 4):
            run_update(training.executor, [adam_step(step)] * 5)
        with sending:
            staging.send(host, 0, gradient[:50])
            staging.send(host, 50, gradient[50:])
            staging.flush()
            staging.wait_for_copies()
            staging.add_to(gradient, host)
    assert issuing.found == on_worker.found == sending.found == []
    assert min(issuing.seen, sending.seen) > 0
    assert (gradient.tolist(), host.tolist()) == ([2] * 100, [1] * 100)
    training.end()
    with issuing:
        torch.ones(3) + 1
    assert len(issuing.found) >= 2, "the watch sees an allocation"


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
def test_a_schedule_that_is_unsafe_or_no_stream_can_execute_is_refused(text: str, message: str) -> None:
    schedule = parse_schedule(text, num_slots=0, slot_numel=0)
    on_gpu = {action.unit for action in schedule.actions if action.kind is ActionKind.GPU_STEP}
    model = Model(numels=(4,) * (1 + max(action.unit for action in schedule.actions)), persistent=[])
    workload = Workload.from_numels(list(model.numels))
    placements = tuple(RESIDENT if unit in on_gpu else CPU for unit in range(len(model.numels)))
    device = HostDevice()
    training = MovingTraining(model, UpdatePlan(workload=workload, placements=placements, num_slots=1), device)
    if message != "may start before":
        check(schedule, workload)
    units = training.memory.units
    with pytest.raises(ScheduleError, match=message):
        Executor(schedule, units, device, training.host_adam, training.host_adam)
    with pytest.raises(ScheduleError, match=message) as caught:
        training.executor.load_plan(schedule, units)
    assert any(line.startswith(">") for line in str(caught.value).splitlines()), "the action is marked"
    training.end()


@pytest.mark.P6
def test_after_a_failure_nothing_is_issued_until_it_is_cleared() -> None:
    victims, issued = {0}, list[str]()

    def fail(update: RangeUpdate) -> None:
        if update.sub_group in victims:
            raise ZeroDivisionError(f"sub-group {update.sub_group}")

    def span(name: str) -> Any:
        issued.append(name)
        return nullcontext()

    training = MovingTraining(MODEL, MIXED, HostDevice(), span=span)
    executor = training.executor
    training.backward(0)
    with before_each_update(fail):
        executor.begin([adam_step(1)] * 5)
        executor.publish(0)
        assert isinstance(executor.failure, ZeroDivisionError), "known where parameters are needed"
        before, names = training.states, list(issued)
        assert "CPU_STEP 0" in names
        assert "CPU_STEP 3" not in names
        for call in (executor.advance, partial(executor.publish, 3), executor.end, executor.prefetch):
            call()
        with pytest.raises(AssertionError):
            executor.begin([adam_step(2)] * 5)
        with pytest.raises(UpdateFailed, match="ZeroDivisionError: sub-group 0") as caught:
            run_update(executor, [adam_step(2)] * 5)
        cause = caught.value.__cause__
        assert isinstance(cause, ZeroDivisionError)
        assert "fail" in [frame.name for frame in traceback.extract_tb(cause.__traceback__)]
        assert issued == names
        assert same(training.states, before)
        victims.clear()
        executor.clear_failure()
        run_update(executor, [adam_step(2)] * 5)
        assert {action.name for action in MIXED.schedule.actions} == set(issued[len(names) :])
    training.end()
