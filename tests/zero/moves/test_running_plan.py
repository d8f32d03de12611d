"""Check what a plan leaves if it cannot be set, and that it needs no memory twice."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch

from deep_opt_states.device.kernels.adam import ElementRange
from deep_opt_states.runtime.executor import Executor
from deep_opt_states.runtime.state_memory import StateMemory
from deep_opt_states.zero.step.exposure import Exposure
from deep_opt_states.zero.step.gradient_buffers import GradientBuffer
from deep_opt_states.zero.step.gradients import Gradients
from deep_opt_states.zero.step.measured_windows import MeasuredWindows
from deep_opt_states.zero.step.running_plan import RunningPlan
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Workload

NUMEL = 8
PLAN = UpdatePlan(workload=Workload.from_numels([NUMEL]), placements=(Placement.CPU,), num_slots=1)


def running_plan(gradient_buffers: Callable[..., list[GradientBuffer]]) -> RunningPlan:
    """Return a plan of one unit that the CPU updates. Its memory and its executor are doubles that do nothing."""
    memory = mock.create_autospec(StateMemory, instance=True)
    memory.units = []
    return RunningPlan(
        plan=PLAN,
        memory=memory,
        executor=mock.create_autospec(Executor, instance=True),
        gradients=Gradients(None, [buffer()], None),
        exposure=mock.create_autospec(Exposure, instance=True),
        windows=mock.create_autospec(MeasuredWindows, instance=True),
        gradient_buffers=gradient_buffers,
    )


def buffer() -> GradientBuffer:
    elements = ElementRange(begin=0, end=NUMEL, sub_group_numel=NUMEL)
    grad, accumulator = torch.zeros(2, NUMEL)
    return GradientBuffer(sub_group=0, elements=elements, grad=grad.clone(), device_accumulator=accumulator.clone())


def test_accumulators_are_freed_before_those_of_the_next_plan_are_reserved() -> None:
    left: list[Any] = []

    def gradient_buffers(plan: UpdatePlan, units: Sequence[Any], is_evicted: bool) -> list[GradientBuffer]:
        left.append(known())
        return [buffer()]

    running = running_plan(gradient_buffers)
    accumulator = running.gradients._buffers[0].device_accumulator
    assert accumulator is not None
    known = weakref.ref(accumulator)
    del accumulator
    assert running.restore()
    assert left == [None]
    assert running.gradients.have_device_accumulators


def test_a_plan_that_is_set_in_part_ends_all_updates() -> None:
    running = running_plan(lambda *_: [buffer()])
    error = RuntimeError("the driver refuses to lock memory")
    running.executor.load_plan.side_effect = error  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="refuses to lock"):
        running.restore()
    running.executor.fail.assert_called_once_with(error)  # type: ignore[attr-defined]


def test_a_plan_without_enough_memory_is_evicted_and_ends_no_update() -> None:
    running = running_plan(lambda *_: [buffer()])
    running.executor.load_plan.side_effect = [torch.OutOfMemoryError, None]  # type: ignore[attr-defined]
    assert not running.restore()
    assert running.is_evicted
    running.executor.fail.assert_not_called()  # type: ignore[attr-defined]
