"""Check that nothing of a failure stays in memory: a failed action frees its own, a loaded checkpoint the update's."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from deep_opt_states.device.cpu import HostDevice
from deep_opt_states.device.kernels.adam import AdamTensors, ElementRange
from deep_opt_states.runtime.executor import Executor
from deep_opt_states.runtime.failure import UpdateFailed
from deep_opt_states.zero.internals import agreement
from deep_opt_states.zero.step import update
from deep_opt_states.zero.step.exposure import Exposure
from deep_opt_states.zero.step.measured_windows import MeasuredWindows
from deep_opt_states.zero.step.update import Update
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Workload
from tests.runtime.plain_adam import PlainAdam, adam_step
from tests.runtime.random_states import fill_gradients, make_states, place


class States:
    """Memory that an action has allocated before it fails."""


@pytest.fixture
def _no_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collection")
def test_a_failed_action_keeps_no_memory_until_the_next_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "gather_values", lambda value: [value])
    allocated: list[weakref.ref[States]] = []

    def allocate_and_fail() -> None:
        states = States()
        allocated.append(weakref.ref(states))
        raise MemoryError("for the states")

    with suppress(MemoryError):
        agreement.raise_together(allocate_and_fail)
    assert [reference() for reference in allocated] == [None]


class RaisingAdam(PlainAdam):
    """A kernel that fails. The traceback of its error refers to the tensors of the update."""

    def update(self, sub_group: int, tensors: AdamTensors, element_range: ElementRange | None = None) -> None:
        raise ZeroDivisionError


def run_to_end(running: Update) -> None:
    running.run([adam_step(1)])
    running.synchronize_ranks()


@pytest.mark.parametrize("defers", [False, True])
def test_the_gradient_of_a_failed_update_is_freed_when_the_failure_is_forgotten(defers: bool) -> None:
    (state,) = states = make_states([20], torch.bfloat16)
    plan = UpdatePlan(workload=Workload.from_numels([20]), placements=(Placement.STREAMED,), num_slots=1)
    place(states, plan.schedule, HostDevice())
    executor = Executor(plan.schedule, states, HostDevice(), PlainAdam(), RaisingAdam())
    with mock.patch.object(update, "StepAgreement"):
        windows = MeasuredWindows(HostDevice(), 0, needs_forward=True)
        parts = {"executor": executor, "exposure": Exposure(HostDevice(), 10), "windows": windows}
        of_plan: Any = SimpleNamespace(plan=plan, **parts)
        running = Update(of_plan, defers=defers, on_finished=lambda *_: None)
    fill_gradients(states, 1)
    gradient = weakref.ref(state.parts[0].grad)
    with pytest.raises(UpdateFailed):
        run_to_end(running)
    running.clear_failure()
    state.parts[0].grad = torch.zeros_like(state.parts[0].grad)
    executor.forget_replaced_tensors()
    gc.collect()
    assert gradient() is None
    executor.close()
