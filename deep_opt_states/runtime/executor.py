"""Executes a schedule: a loop over a dispatch table, no decisions.

Lanes h2d, compute and d2h are a stream each, so that transfers in both directions and the update overlap; the
cpu lane is a worker thread. An action that waits for a stream's action is held back on its stream by an event;
one that waits for the cpu lane is not issued before the worker is done, since no stream can wait for a thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

from deep_opt_states.device.interface import Device, Event, Stream
from deep_opt_states.device.kernels.adam import AdamKernel, AdamStep, AdamTensors
from deep_opt_states.runtime.slots import Slot
from deep_opt_states.runtime.state import SubGroupState
from deep_opt_states.runtime.worker import CpuLane, Worker
from perf_model.action import Action, ActionKind, Lane
from perf_model.check import check
from perf_model.schedule import Schedule
from perf_model.timeline import Span, Timeline
from perf_model.workload import Workload


class UpdateFailed(RuntimeError):
    """An update stopped half way: some sub-groups are updated, others are not."""


class Executor:
    """Reserves slots, streams, events and the worker once; ``run`` reserves nothing.

    ``host_adam`` updates in host memory, ``device_adam`` in slots; ``worker`` is the cpu lane. Raises
    ``ScheduleError`` for a schedule that is not safe to execute.
    """

    def __init__(
        self,
        schedule: Schedule,
        states: Sequence[SubGroupState],
        device: Device[Any],
        host_adam: AdamKernel,
        device_adam: AdamKernel | None,
        worker: CpuLane | None = None,
    ) -> None:
        check(schedule, Workload.of([state.numel for state in states]))
        self._schedule = schedule
        self._states = states
        self._device = device
        self._host_adam = host_adam
        self._device_adam = device_adam
        self._slots = self._reserve_slots()
        self._streams: dict[Lane, Stream[Any]] = {lane: device.stream() for lane in Lane if lane is not Lane.CPU}
        on_streams = [action for action in schedule.actions if action.lane is not Lane.CPU]
        self._started: dict[str, Event] = {action.name: device.event() for action in on_streams}
        self._finished: dict[str, Event] = {action.name: device.event() for action in on_streams}
        self._drained: dict[Lane, Event] = {lane: device.event() for lane in self._streams}
        self._origin = device.event()
        self._origin_s = 0.0
        self._cpu_spans: dict[str, tuple[float, float]] = {}
        self._worker = worker or Worker()
        self._stop = threading.Event()
        self.failure: BaseException | None = None
        self._bodies: dict[ActionKind, Callable[[Action], None]] = {
            ActionKind.PREFETCH: self._prefetch,
            ActionKind.GPU_STEP: self._gpu_step,
            ActionKind.FLUSH_STATES: self._flush_states,
            ActionKind.CPU_STEP: self._cpu_step,
            ActionKind.PUBLISH: self._publish,
        }

    def run(self, steps: Sequence[AdamStep]) -> None:
        """One update phase; ``steps`` has one entry a sub-group. Returns when every action has finished.

        Raises ``UpdateFailed`` from the first exception of any lane, and again at every later call until
        ``forget_failure``: the states are torn between two steps.
        """
        if self.failure is not None:
            raise self.torn()
        self._stop.clear()
        updated: dict[str, Future[None]] = {}
        try:
            for kernel in {id(kernel): kernel for kernel in (self._host_adam, self._device_adam)}.values():
                if kernel is not None:
                    kernel.begin_step(steps)
            self._begin()
            for action in self._schedule.actions:
                if self._stop.is_set():
                    break
                body = partial(self._bodies[action.kind], action)
                if action.lane is Lane.CPU:
                    updated[action.name] = self._worker.submit(partial(self._on_worker, action, body))
                else:
                    self._on_stream(action, body, updated)
            for future in updated.values():
                future.result()
            self._drain_streams()
        except BaseException as error:
            self._stop.set()
            # At once: what follows waits, and may be interrupted.
            self.fail(error)
            self.fail(self._first_error(updated, error))
            # What was issued before the failure still writes: to states that a checkpoint will be loaded into, from
            # slots that will be given back. A device that fails here, too, has its own failure told already.
            with suppress(Exception):
                self._drain_streams()
            if not isinstance(error, Exception):
                raise
            raise self.torn() from self.failure

    def touch(self, states: Sequence[SubGroupState]) -> None:
        """Zeros ``states``, which are updated on the CPU, on the threads that will update them."""
        for state in states:
            self._worker.submit(partial(self._host_adam.zero, _on_host(state))).result()

    def timeline(self) -> Timeline:
        """When each action of the last ``run`` ran."""
        spans = []
        for action in self._schedule.actions:
            if action.lane is Lane.CPU:
                start_s, end_s = self._cpu_spans[action.name]
            else:
                start_s = self._started[action.name].seconds_after(self._origin)
                end_s = self._finished[action.name].seconds_after(self._origin)
            spans.append(Span(action, start_s, end_s))
        return Timeline(tuple(spans))

    def torn(self) -> UpdateFailed:
        """What every later use of the states is answered with, after a failure; carries its cause's traceback."""
        error = UpdateFailed(
            f"The optimizer update stopped half way ({type(self.failure).__name__}: {self.failure}). Parameters and "
            f"optimizer states are torn between two steps and will not be used or saved. Mend the cause below, "
            f"and continue from the last checkpoint."
        )
        error.__cause__ = self.failure
        return error

    def fail(self, cause: BaseException) -> None:
        """For the caller that knows the states to be torn, here or on another rank."""
        self.failure = cause

    def forget_failure(self) -> None:
        """For the caller that has restored every state, from a checkpoint."""
        self.failure = None

    def close(self) -> None:
        """End the worker and give the slots back; the executor is of no use after that."""
        self._worker.close()
        self._slots.clear()
        self._states = ()

    def _reserve_slots(self) -> dict[str, Slot]:
        """By action name: the part of its slot that the action works on."""
        slots = [Slot.reserve(self._device, self._schedule.slot_numel) for _ in range(self._schedule.num_slots)]
        return {
            action.name: slots[action.slot].narrow(self._states[action.sub_group].numel)
            for action in self._schedule.actions
            if action.slot is not None
        }

    def _begin(self) -> None:
        """The host waits for the caller's stream, so that nothing it issues later can start before that is done.

        Backward's kernels may still read the 16-bit parameters, and write gradients to host memory that the worker
        reads. DeepSpeed has joined its reduction stream to the caller's by then. The two clocks share an origin here.
        """
        self._device.current_stream().record(self._origin)
        self._origin.synchronize()
        self._origin_s = time.perf_counter()

    def _on_stream(self, action: Action, body: Callable[[], None], updated: dict[str, Future[None]]) -> None:
        stream = self._streams[action.lane]
        for name in action.waits:
            if name in updated:
                updated[name].result()
            else:
                stream.wait(self._finished[name])
        if self._stop.is_set():
            return  # what was waited for did not run
        stream.record(self._started[action.name])
        with stream.issue():
            body()
        stream.record(self._finished[action.name])

    def _on_worker(self, action: Action, body: Callable[[], None]) -> None:
        if self._stop.is_set():
            return
        try:
            for name in action.waits:
                self._finished[name].synchronize()
            start_s = time.perf_counter()
            body()
            self._cpu_spans[action.name] = (start_s - self._origin_s, time.perf_counter() - self._origin_s)
        except BaseException:
            # The host must not issue, and the worker not start, another action.
            self._stop.set()
            raise

    def _drain_streams(self) -> None:
        """The next forward gathers on a stream of DeepSpeed's that does not wait for ours: the host does."""
        for lane, stream in self._streams.items():
            stream.record(self._drained[lane])
        for event in self._drained.values():
            event.synchronize()

    def _first_error(self, updated: dict[str, Future[None]], error: BaseException) -> BaseException:
        """The worker's exception, if it had one: what the host saw may only follow from it. Waits for the worker."""
        failures = [failure for future in updated.values() if (failure := future.exception()) is not None]
        return failures[0] if failures else error

    def _prefetch(self, action: Action) -> None:
        state, slot = self._states[action.sub_group], self._slots[action.name]
        self._device.copy(slot.master, state.master)
        self._device.copy(slot.exp_avg, state.exp_avg)
        self._device.copy(slot.exp_avg_sq, state.exp_avg_sq)

    def _gpu_step(self, action: Action) -> None:
        assert self._device_adam is not None
        state = self._states[action.sub_group]
        at = self._slots.get(action.name, state)
        self._device_adam.update(
            action.sub_group,
            AdamTensors(
                master=at.master, exp_avg=at.exp_avg, exp_avg_sq=at.exp_avg_sq, grad=state.grad, param=state.param
            ),
        )

    def _flush_states(self, action: Action) -> None:
        state, slot = self._states[action.sub_group], self._slots[action.name]
        self._device.copy(state.master, slot.master)
        self._device.copy(state.exp_avg, slot.exp_avg)
        self._device.copy(state.exp_avg_sq, slot.exp_avg_sq)

    def _cpu_step(self, action: Action) -> None:
        self._host_adam.update(action.sub_group, _on_host(self._states[action.sub_group]))

    def _publish(self, action: Action) -> None:
        state = self._states[action.sub_group]
        assert state.rounded is not None
        self._device.copy(state.param, state.rounded)


def _on_host(state: SubGroupState) -> AdamTensors:
    assert state.rounded is not None
    return AdamTensors(
        master=state.master,
        exp_avg=state.exp_avg,
        exp_avg_sq=state.exp_avg_sq,
        grad=state.grad,
        # An fp32 model's parameters are published from the master weights.
        param=None if state.rounded is state.master else state.rounded,
    )
