"""Run training iterations on a virtual clock: a forward that gathers parameters ahead overlaps with a real update.

``Gathers``, ``Update``, ``Exposure`` and ``Executor`` are the real classes. The device computes when each event is
reached instead of waiting for it. DeepSpeed's coordinator is reduced to its order of waits: a module's parameters are
gathered on a separate stream, the computing stream waits for that stream, and the parameters of the next modules are
gathered ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
from deepspeed.runtime.zero.partition_parameters import Init, ZeroParamStatus

from deep_opt_states.device.kernels.adam import AdamTensors, ElementRange
from deep_opt_states.runtime.executor import Executor
from deep_opt_states.zero.step import update as update_module
from deep_opt_states.zero.step.exposure import Exposure
from deep_opt_states.zero.step.gathers import Gathers
from deep_opt_states.zero.step.measured_windows import MeasuredWindows
from deep_opt_states.zero.step.update import Update
from perf_model.prediction.timeline import PhaseSpan, Timeline
from perf_model.schedule.action import Lane
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Workload
from tests.profiler.virtual import VirtualDevice, VirtualStream
from tests.runtime.plain_adam import PlainAdam, adam_step
from tests.runtime.random_states import fill_gradients, make_states, place

NUMEL = 8
"""The number of elements in each module's only parameter, which forms one unit."""


@dataclass(frozen=True, kw_only=True)
class Durations:
    """Seconds on the streams: each module's forward; all copies of one unit in one direction, its update and its
    all-gather. The host takes no time."""

    forward_s: Sequence[float]
    prefetch_s: float = 0.0
    flush_s: float = 0.0
    gpu_step_s: float = 0.0
    all_gather_s: float = 0.0


@dataclass
class Iteration:
    """The measurements of one update and the forward after it, and the times on the virtual clock."""

    phases: Sequence[PhaseSpan] = ()
    elapsed_s: float = 0.0
    """Seconds from the decision to update until both the update and forward are over."""
    all_gather_standstill_s: float = 0.0
    """Seconds for which the computing stream waited while an all-gather ran."""


class GpuAdam(PlainAdam):
    def __init__(self, device: VirtualDevice, step_s: float) -> None:
        super().__init__()
        self._device = device
        self._step_s = step_s

    def update(self, sub_group: int, tensors: AdamTensors, element_range: ElementRange | None = None) -> None:
        super().update(sub_group, tensors, element_range)
        self._device.issuing.run(self._step_s)


@dataclass
class FakeCoordinator:
    """The parts of ``PartitionedParameterCoordinator`` that ``Gathers`` and this forward use."""

    device: VirtualDevice
    modules: Sequence[torch.nn.Module]
    ahead: int
    """The number of modules whose parameters are gathered ahead."""
    one_by_one: bool = False
    """Whether each parameter has its own all-gather, as DeepSpeed does for parameters on different devices."""

    def __post_init__(self) -> None:
        self.gathering = self.device.stream()
        # The caller passes DeepSpeed's current stream, which the CPU accelerator does not have. Wait for the device's.
        self._PartitionedParameterCoordinator__allgather_stream = SimpleNamespace(
            wait_stream=lambda _: self._wait(self.gathering, self.device.current_stream())
        )
        self._PartitionedParameterCoordinator__prefetch_bucket_sz = self.ahead * NUMEL
        self._all_gathers: list[tuple[float, float]] = []
        self.all_gather_standstill_s = 0.0
        self.restart()

    def restart(self) -> None:
        """Prepare the next forward."""
        params = [param for module in self.modules for param in module.parameters()]
        self._PartitionedParameterCoordinator__param_queue = deque(SimpleNamespace(param=param) for param in params)
        for param in params:
            param.ds_status = ZeroParamStatus.NOT_AVAILABLE

    def is_complete_trace(self) -> bool:
        return True

    def all_gather(self, duration_s: float) -> None:
        start_s = self.gathering.starts_s()
        self.device.issuing.run(duration_s)
        self._all_gathers.append((start_s, self.gathering.free_at_s))

    def fetch_sub_module(self, module: torch.nn.Module, forward: bool) -> None:
        queue = self._PartitionedParameterCoordinator__param_queue
        own = list(module.parameters(recurse=False))
        self._gather([param for param in own if param.ds_status is ZeroParamStatus.NOT_AVAILABLE])
        self._wait_for_gathering()
        while queue and any(queue[0].param is param for param in own):
            queue.popleft()
        gathered_ahead: list[Any] = []
        while queue and len(gathered_ahead) * NUMEL < self._PartitionedParameterCoordinator__prefetch_bucket_sz:
            gathered_ahead.append(queue.popleft().param)
        missing = [param for param in gathered_ahead if param.ds_status is ZeroParamStatus.NOT_AVAILABLE]
        for params in [[param] for param in missing] if self.one_by_one else [missing]:
            self._gather(params)

    def _gather(self, params: Sequence[Any]) -> None:
        if params:
            with self.gathering.issue():
                params[0].all_gather_coalesced(params)

    def _wait_for_gathering(self) -> None:
        computing = self.device.current_stream()
        begin_s = computing.starts_s()
        self._wait(computing, self.gathering)
        end_s = computing.starts_s()
        for start_s, finish_s in self._all_gathers:
            self.all_gather_standstill_s += max(0.0, min(end_s, finish_s) - max(begin_s, start_s))
        self._all_gathers.clear()

    def _wait(self, stream: VirtualStream, other: VirtualStream) -> None:
        reached = self.device.event()
        other.record(reached)
        stream.wait(reached)


class VirtualTraining:
    """A training loop whose update is real and whose device and forward run on a virtual clock."""

    def __init__(self, durations: Durations, *, ahead: int, num_slots: int = 2, one_by_one: bool = False) -> None:
        count = len(durations.forward_s)
        self._durations = durations
        workload = Workload.from_numels([NUMEL] * count)
        plan = UpdatePlan(workload=workload, placements=(Placement.STREAMED,) * count, num_slots=num_slots)
        device = self._device = VirtualDevice()
        self._states = make_states([NUMEL] * count, torch.bfloat16)
        place(self._states, plan.schedule, device)
        self._executor = Executor(
            plan.schedule, self._states, device, PlainAdam(), GpuAdam(device, durations.gpu_step_s)
        )
        # The states of a unit take three copies. Stream 0 is the caller's and copies nothing.
        lanes = [lane for lane in Lane if lane is not Lane.CPU]
        each_s = {Lane.H2D: durations.prefetch_s / 3, Lane.D2H: durations.flush_s / 3}
        self._copy_s = [0.0, *(each_s.get(lane, 0.0) for lane in lanes)]
        self.reported: list[tuple[tuple[PhaseSpan, ...], Timeline]] = []
        self.exposure = Exposure(device, max_intervals=100)
        with mock.patch.object(update_module, "StepAgreement"):
            windows = MeasuredWindows(device, 0, needs_forward=True)
            parts = {"executor": self._executor, "exposure": self.exposure, "windows": windows}
            running: Any = SimpleNamespace(plan=plan, **parts)
            self._update = Update(running, defers=True, on_finished=self._append_report)
        self._modules = [self._module(index) for index in range(count)]
        root = torch.nn.Sequential(*self._modules)
        self._coordinator = FakeCoordinator(device, self._modules, ahead, one_by_one)
        ranges = {index: (index, 0, NUMEL) for index in range(count)}
        self._gathers = Gathers(root, self._coordinator, self._update, ranges, running)

    @classmethod
    @contextmanager
    def open(cls, durations: Durations, **options: Any) -> Iterator[VirtualTraining]:
        """Yield a training loop, and close its executor at the end."""
        training = cls(durations, **options)
        try:
            yield training
        finally:
            training._gathers.release()
            training._executor.close()

    def iteration(self, *, updates: bool = True, reports: bool = True, slower: float = 1.0) -> Iteration:
        """Run an update, if ``updates``, and the forward after it until its last module has computed.

        The update is reported when it is over, or, if not ``reports``, during the next one. Copies take ``slower``
        times as long as usual.
        """
        device, coordinator, iteration = self._device, self._coordinator, Iteration()
        fill_gradients(self._states, step=1)
        device.copy_s = [slower * copy_s for copy_s in self._copy_s]
        device.now_s = begin_s = device.current_stream().starts_s()
        if updates:
            self._update.run([adam_step(1)] * len(self._states))
            self._update.advance()
            self._update.report_previous()
        coordinator.restart()
        coordinator.all_gather_standstill_s = 0.0
        for module, forward_s in zip(self._modules, self._durations.forward_s, strict=True):
            coordinator.fetch_sub_module(module, forward=True)
            device.issuing.run(forward_s)
        self._update.wait_on_stream()
        iteration.elapsed_s = device.current_stream().starts_s() - begin_s
        iteration.all_gather_standstill_s = coordinator.all_gather_standstill_s
        if reports and updates:
            self._update.report()
            iteration.phases, _ = self.reported[-1]
        return iteration

    def backward(self, *, skips: bool = False) -> None:
        """Prefetch as in backward, which takes no time here, and skip the step if ``skips``."""
        self._update.prefetch()
        if skips:
            self._update.skip()

    def fail_after_update(self) -> None:
        """Emulate a step that fails between its update and the report of the previous one, then end the engine."""
        self._update.run([adam_step(1)] * len(self._states))
        self._update.wait_on_stream()
        self._update.close()

    def _append_report(self, phases: tuple[PhaseSpan, ...], timeline: Callable[[], Timeline]) -> None:
        self.reported.append((phases, timeline()))

    def _module(self, index: int) -> torch.nn.Module:
        module = torch.nn.Module()
        module.ds_external_parameters = lambda: ()  # type: ignore[assignment]
        param: Any = torch.nn.Parameter(torch.zeros(NUMEL))
        param.ds_id, param.ds_numel = index, NUMEL
        param.ds_tensor = SimpleNamespace(status=PartitionedParamStatus.AVAILABLE)
        param.all_gather_coalesced = lambda params: self._all_gather(params)
        module.register_parameter("weight", param)
        return module

    def _all_gather(self, params: Sequence[Any]) -> None:
        # As DeepSpeed does, and then the hook of ``Gathers``.
        Init._ensure_availability_of_partitioned_params(mock.Mock(), params)
        self._coordinator.all_gather(len(params) * self._durations.all_gather_s)
        for param in params:
            param.ds_status = ZeroParamStatus.INFLIGHT
