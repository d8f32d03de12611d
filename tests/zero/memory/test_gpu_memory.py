"""Check when ranks plan for the memory of the GPU, and that a failed allocation is logged at the end."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from deep_opt_states.device import cuda
from deep_opt_states.zero.step import gpu_memory
from deep_opt_states.zero.step.gpu_memory import FIRST_STEPS, PLANNED_STEPS, GpuBudget, GpuMemory
from perf_model.plan_request import PlanRequest
from perf_model.prediction.memory import Budgets, memory_of
from perf_model.prediction.overlap_windows import Windows
from perf_model.prediction.slowdown import Slowdown
from perf_model.schedule.cutting import BORDER_MULTIPLE
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.rules import PlacementRule, PlacementRules
from perf_model.schedule.workload import Partition
from tests.model.costs import cost

GB = 10**9
NUMEL = BORDER_MULTIPLE * 4_000_000
WINDOWS = Windows(backward_s=0.05, forward_s=0.1)
REQUEST = PlanRequest(
    sub_groups=[[Partition(f"layers.{layer}.weight", NUMEL) for layer in range(16)]],
    unit_sizes=(NUMEL,),
    cost=cost(cpu=1.5e9, h2d=25e9, d2h=26e9, both=42e9, dram=90e9, gpu=8e10, latency=1e-5),
    budgets=Budgets(gpu_bytes=0),
    windows=Windows(),
)


class RecordedPlan:
    uses = None
    gradients = SimpleNamespace(have_device_accumulators=False)
    executor = SimpleNamespace(end=lambda: None)

    def __init__(self, plan: UpdatePlan) -> None:
        self.plan, self.is_evicted, self.measured = plan, False, WINDOWS
        self.calls: list[str] = []

    @property
    def windows(self) -> Any:
        return SimpleNamespace(windows=lambda: self.measured, measure_again=lambda: self.calls.append("measure"))

    @property
    def holds_memory(self) -> bool:
        return not self.is_evicted and self.plan.numel(Placement.CPU) < self.plan.workload.numel

    def evict(self) -> None:
        self.calls.append("evict")
        self.is_evicted = True

    def adopt(self, plan: UpdatePlan) -> None:
        self.calls.append("adopt")
        self.plan, self.is_evicted = plan, True

    def restore(self) -> bool:
        self.calls.append("restore")
        self.is_evicted = False
        return True


class TrainingOfOneRank:
    def __init__(self, patch: pytest.MonkeyPatch, request: PlanRequest = REQUEST, *, free_bytes: int = 10 * GB) -> None:
        self.free_bytes, self.retries, self.failed = free_bytes, 0, 0
        self.peers: list[tuple[Any, ...]] = []
        self.running = RecordedPlan(request.plan().plan)
        budget = GpuBudget(start_bytes=0, margin_bytes=GB, fills=True)
        budget.require(request.fixed_bytes)
        running: Any = self.running
        self.memory = GpuMemory(running, request, budget, before_move=lambda: None)
        patch.setattr(cuda, "free_and_retries", lambda _: (self.free_bytes - self.held_bytes, self.retries))
        patch.setattr(cuda, "failed_allocations", lambda: self.failed)
        patch.setattr(gpu_memory, "free_bytes", lambda: self.free_bytes - self.held_bytes)
        patch.setattr(gpu_memory, "gather_values", self._gather)
        patch.setattr(gpu_memory, "raise_together", lambda action: action())
        patch.setattr(gpu_memory, "same_on_all_ranks", lambda find, _: find())
        patch.setattr(gpu_memory.dist, "get_rank", lambda: 0)

    def _gather(self, value: Any) -> list[Any]:
        return [value, *(self.peers if isinstance(value, tuple) else ())]

    @property
    def held_bytes(self) -> int:
        return 0 if self.running.is_evicted else memory_of(self.running.plan, REQUEST.setup).gpu_bytes

    def step(self) -> bool:
        self.memory.begin_forward()
        changed = self.memory.adapt(is_short_anywhere=self.memory.is_short)
        self.memory.observe()
        return changed


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> TrainingOfOneRank:
    return TrainingOfOneRank(monkeypatch)


def filled(training: TrainingOfOneRank) -> TrainingOfOneRank:
    assert [training.step() for _ in range(FIRST_STEPS + 1)] == [False] * (FIRST_STEPS - 1) + [True, False]
    return training


@pytest.mark.P5
def test_what_is_free_after_the_first_steps_is_planned_with_once(training: TrainingOfOneRank) -> None:
    filled(training)
    assert training.running.calls == ["adopt", "restore"]
    assert 0 < training.held_bytes <= 9 * GB
    expected = memory_of(training.running.plan, REQUEST.setup).gpu_bytes
    assert training.memory.bytes == expected
    assert not any(training.step() for _ in range(200)), "the plan is confirmed once, and nothing else leads to a plan"
    assert training.running.calls == ["adopt", "restore", "measure"]


@pytest.mark.P5
def test_a_plan_is_reconsidered_once_when_its_copies_slow_down_forward(training: TrainingOfOneRank) -> None:
    before = filled(training).running.plan
    training.running.measured = replace(WINDOWS, slowdown=Slowdown(cpu=0.1, copies=0.8))
    assert [training.step() for _ in range(50)].index(True) == PLANNED_STEPS - 2
    after = training.running.plan
    streamed = [plan.numel(Placement.STREAMED) for plan in (before, after)]
    assert streamed[0] > streamed[1]
    training.running.measured = WINDOWS
    assert not any(training.step() for _ in range(50))


def test_no_plan_is_made_before_all_ranks_know_their_windows_and_their_need(training: TrainingOfOneRank) -> None:
    unknown_need, unmeasured = (5 * GB, False, WINDOWS, 0), (5 * GB, True, None, 0)
    for peer in (unknown_need, unmeasured):
        training.peers = [peer]
        assert not any(training.step() for _ in range(FIRST_STEPS + 3))
    training.peers = [(5 * GB, True, WINDOWS, 0)]
    assert training.step()
    assert 0 < training.held_bytes <= 5 * GB, "the least of all ranks"


@pytest.mark.P6
def test_states_that_rules_keep_are_planned_for_once_and_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    request = replace(REQUEST, rules=PlacementRules((PlacementRule(("*",), "resident"),)))
    request = replace(request, budgets=Budgets(gpu_bytes=request.fixed_bytes))
    ruled = TrainingOfOneRank(monkeypatch, request, free_bytes=20 * GB)
    for _ in range(FIRST_STEPS + 2):
        ruled.step()
    plan = ruled.running.plan
    assert set(plan.placements) == {Placement.RESIDENT}
    ruled.free_bytes = 2 * GB
    assert sum(ruled.step() for _ in range(20)) == 1
    assert ruled.running.plan.placements == plan.placements


def test_retries_and_failures_of_allocations_for_a_plan_do_not_count(training: TrainingOfOneRank) -> None:
    watch = cuda.AllocatorWatch()
    with watch.changing_plan():
        training.retries += 3
        training.failed += 1
    assert watch.free_and_retries() == (training.free_bytes, 0)
    assert not watch.has_failed()
    training.retries += 1
    training.failed += 1
    assert watch.free_and_retries() == (training.free_bytes, 1)
    assert watch.has_failed()


@pytest.mark.P6
def test_a_failed_allocation_is_logged_without_a_process_group(training: TrainingOfOneRank) -> None:
    filled(training)
    at_exit: list[Any] = []

    def register(call: Any, *_: Any) -> Any:
        at_exit.append(call)
        return call

    def unregister(call: Any) -> None:
        at_exit[:] = [each for each in at_exit if each != call]

    with (
        mock.patch("atexit.register", register),
        mock.patch("atexit.unregister", unregister),
        mock.patch("deep_opt_states.log.warn_this_rank") as log,
        ExitStack() as resources,
    ):
        training.memory.log_failure_at_exit(resources)
        with ExitStack() as of_another_engine:
            training.memory.log_failure_at_exit(of_another_engine)
        assert len(at_exit) == 1, "the first engine's is left"
        training.failed += 1
    assert not at_exit
    assert "an allocation has failed while optimizer states hold" in log.call_args.args[0]
