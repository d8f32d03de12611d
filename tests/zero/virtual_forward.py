"""Training iterations on a virtual clock: a forward that gathers parameters ahead, beside a real update.

``Gathers``, ``Update``, ``Exposure`` and ``Executor`` are the real ones. The device computes when each event is reached
instead of waiting for it, and DeepSpeed's coordinator is cut down to its order of waits: a module's parameters are
gathered on a stream of their own, the computing stream waits for that stream, and the next modules' are gathered ahead.
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
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from deep_opt_states.device.kernels.adam import AdamTensors, Part
from deep_opt_states.runtime.executor import Executor
from deep_opt_states.runtime.exposure import Exposure
from deep_opt_states.zero.step import update as update_module
from deep_opt_states.zero.step.gathers import Gathers
from deep_opt_states.zero.step.update import Update
from perf_model.prediction.timeline import PhaseSpan, Timeline
from perf_model.schedule.action import Lane
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Workload
from tests.profiler.virtual import VirtualDevice, VirtualStream
from tests.runtime.adam import PlainAdam, adam_step
from tests.runtime.states import fill_gradients, make_states

NUMEL = 8
"""Of each module's one parameter, which is a sub-group of its own."""


@dataclass(frozen=True, kw_only=True)
class Durations:
    """Seconds on the streams: of all copies of one sub-group in a direction, of its update, of its all-gather, and of
    each module's forward. The host takes no time."""

    forward_s: Sequence[float]
    prefetch_s: float = 0.0
    flush_s: float = 0.0
    gpu_step_s: float = 0.0
    all_gather_s: float = 0.0


@dataclass
class Iteration:
    """What was measured of one update and the forward after it, beside what the virtual clock says."""

    phases: Sequence[PhaseSpan] = ()
    elapsed_s: float = 0.0
    """From the decision until the update is over, and forward, too."""
    all_gather_standstill_s: float = 0.0
    """The part of the computing stream's waits in which an all-gather ran."""


class GpuAdam(PlainAdam):
    def __init__(self, device: VirtualDevice, step_s: float) -> None:
        super().__init__()
        self._device = device
        self._step_s = step_s

    def update(self, sub_group: int, tensors: AdamTensors, part: Part | None = None) -> None:
        super().update(sub_group, tensors, part)
        self._device.issuing.run(self._step_s)


@dataclass
class Coordinator:
    """The parts of ``PartitionedParameterCoordinator`` that ``Gathers`` and this forward use."""

    device: VirtualDevice
    modules: Sequence[torch.nn.Module]
    ahead: int
    """Modules whose parameters are gathered ahead."""
    one_by_one: bool = False
    """Each in an all-gather of its own, as DeepSpeed gathers what lies in different places."""

    def __post_init__(self) -> None:
        self.gathering = self.device.stream()
        # The stream that it is asked to wait for is DeepSpeed's current one, which the CPU accelerator does not have.
        self._PartitionedParameterCoordinator__allgather_stream = SimpleNamespace(
            wait_stream=lambda _: self._wait(self.gathering, self.device.current_stream())
        )
        self._PartitionedParameterCoordinator__prefetch_bucket_sz = self.ahead * NUMEL
        self._all_gathers: list[tuple[float, float]] = []
        self.all_gather_standstill_s = 0.0
        self.restart()

    def restart(self) -> None:
        """Begin another forward."""
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
    def __init__(self, durations: Durations, *, ahead: int, num_slots: int = 2, one_by_one: bool = False) -> None:
        count = len(durations.forward_s)
        self._durations = durations
        workload = Workload.of([NUMEL] * count)
        plan = UpdatePlan(workload=workload, placements=(Placement.STREAMED,) * count, num_slots=num_slots)
        device = self._device = VirtualDevice()
        self._states = make_states([NUMEL] * count, torch.bfloat16)
        self._executor = Executor(
            plan.schedule, self._states, device, PlainAdam(), GpuAdam(device, durations.gpu_step_s)
        )
        # A sub-group's states are three copies. The caller's stream is the first.
        lanes = [lane for lane in Lane if lane is not Lane.CPU]
        each_s = {Lane.H2D: durations.prefetch_s / 3, Lane.D2H: durations.flush_s / 3}
        self._copy_s = [0.0, *(each_s.get(lane, 0.0) for lane in lanes)]
        self.reported: list[tuple[tuple[PhaseSpan, ...], Timeline]] = []
        self.exposure = Exposure(device, max_intervals=100)
        with mock.patch.object(update_module, "FailureAgreement"):
            self._update = Update(self._executor, self.exposure, defers=True, finished=self._reported)
        self._modules = [self._module(index) for index in range(count)]
        root = torch.nn.Sequential(*self._modules)
        self._coordinator = Coordinator(device, self._modules, ahead, one_by_one)
        self._gathers = Gathers(root, self._coordinator, self._update, {index: index for index in range(count)})

    @classmethod
    @contextmanager
    def of(cls, durations: Durations, **how: Any) -> Iterator[VirtualTraining]:
        training = cls(durations, **how)
        try:
            yield training
        finally:
            training._executor.close()

    def iteration(self, *, updates: bool = True, reports: bool = True, slower: float = 1.0) -> Iteration:
        """An update, where one is asked for, and the forward after it until its last module has computed.

        The update is reported when it is over, or without ``reports`` beside the next one. Copies take ``slower`` times
        as long as usual.
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
        self._update.end()
        iteration.elapsed_s = device.current_stream().starts_s() - begin_s
        iteration.all_gather_standstill_s = coordinator.all_gather_standstill_s
        if reports and updates:
            self._update.report()
            iteration.phases, _ = self.reported[-1]
        return iteration

    def fails_after_update(self) -> None:
        """A step that raises between its update and the report of the one before, and the end of the engine."""
        self._update.run([adam_step(1)] * len(self._states))
        self._update.end()
        self._update.close()

    def _reported(self, phases: tuple[PhaseSpan, ...], timeline: Callable[[], Timeline]) -> None:
        self.reported.append((phases, timeline()))

    def _module(self, index: int) -> torch.nn.Module:
        module = torch.nn.Module()
        module.ds_external_parameters = lambda: ()  # type: ignore[assignment]
        param: Any = torch.nn.Parameter(torch.zeros(NUMEL))
        param.ds_id, param.ds_numel = index, NUMEL
        param.all_gather = param.partition = lambda *_: None
        param.all_gather_coalesced = lambda params: self._all_gather(params)
        module.register_parameter("weight", param)
        return module

    def _all_gather(self, params: Sequence[Any]) -> None:
        self._coordinator.all_gather(len(params) * self._durations.all_gather_s)
        for param in params:
            param.ds_status = ZeroParamStatus.INFLIGHT
