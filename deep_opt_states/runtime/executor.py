"""Execute a schedule: loop over its actions in order, and decide nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from operator import is_
from typing import Any

import torch

from deep_opt_states.device.interface import Device, Event
from deep_opt_states.device.kernels.adam import AdamKernel, AdamStep, AdamTensors
from deep_opt_states.runtime.actions import Actions
from deep_opt_states.runtime.issuer import Issuer
from deep_opt_states.runtime.kept_failure import KeptFailure
from deep_opt_states.runtime.lanes import LaneStreams, Waiter, check_executable
from deep_opt_states.runtime.state import UnitState
from deep_opt_states.runtime.uninterrupted import Uninterrupted, Value, section
from deep_opt_states.runtime.worker import HostThreads
from deep_opt_states.runtime.write_back import StatesElsewhere
from perf_model.prediction.timeline import Timeline
from perf_model.schedule.action import Lane
from perf_model.schedule.schedule import Schedule


class Executor:
    """The runtime that executes one schedule per optimizer step, on the accelerator's streams and one worker thread.

    ``host_adam`` updates in host memory, and ``device_adam``, None if the CPU updates all units, on the accelerator.
    Actions run inside the context ``span(name)``. Raise ``ScheduleError`` if the schedule is not safe to execute. Only
    the constructor and ``load_plan`` reserve streams, events and slots.

    **Order of calls.** One thread makes all calls. ``publish`` and ``advance`` are for the time between ``begin`` and
    ``end``; the methods for the time between two updates assert it.

    **Memory.** From ``begin`` to ``end``, the caller neither writes to gradients and states nor reads parameters. After
    ``publish``, it may read and write the unit's parameters on the stream that was current there. After ``end``, it may
    use gradients and parameters: everywhere if the host has waited, otherwise on the stream that was current there. It
    may use optimizer states from ``sync_states_to_host`` to ``prefetch``, ``speculate`` or ``begin``.

    **Speculation.** ``speculate`` updates eager units for the step that ``begin`` will probably receive, in memory that
    nothing reads before. If the steps or the gradients are others then, it was in vain. A caller that writes to
    gradients of speculated units calls ``forget_speculations``.

    **Failure.** Any exception in any lane is fatal for the update: some units may be updated and others not.
    ``failure`` keeps it, and nothing is issued until ``clear_failure``. It is not raised, because the other ranks would
    wait in a collective for a rank that has raised alone: the caller agrees with them first.

    **Interrupts.** An exception that a signal handler raises is no failure: it ends only the wait for a *section*
    (``uninterrupted.py``). Every wait can be repeated with the same result, and a handler may call any method itself.
    """

    def __init__(
        self,
        schedule: Schedule,
        states: Sequence[UnitState],
        device: Device[Any],
        host_adam: AdamKernel,
        device_adam: AdamKernel | None,
        span: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._device = device
        self._lanes = LaneStreams(device)
        self._elsewhere = StatesElsewhere(device, self._lanes.streams)
        # Where slots are host memory, both are the same kernel, whose step starts once.
        self._kernels = tuple({id(adam): adam for adam in (host_adam, device_adam) if adam is not None}.values())
        self._host_adam = host_adam
        self._actions = Actions(device, host_adam, device_adam)
        self._assumed: tuple[AdamStep, ...] | None = None
        self._speculated_grads: dict[int, list[torch.Tensor]] = {}
        self.kept_speculations: bool | None = None
        """Whether the last update kept all speculated steps; None if none was speculated."""
        self._pending = self._flushing = False
        """Whether an update is in flight, and whether flushes and writes may be: only a stream has waited."""
        self._threads = HostThreads(device.enter_thread, uses_disk=schedule.num_disk_slots > 0)
        self._uninterrupted = Uninterrupted(device)
        self._issuer = Issuer(device, self._lanes, self._threads, self._actions.bodies, span)
        self._kept = KeptFailure(self._issuer, self._lanes, self._forget_speculations)
        try:
            self._use(schedule, states)
        except BaseException:
            self.close()
            raise

    @property
    def pending(self) -> bool:
        """Return whether an update has started and has not ended since, even if it has failed."""
        self._uninterrupted.settle()
        return self._pending

    @property
    def failure(self) -> BaseException | None:
        """Return the exception that left the states inconsistent, until ``clear_failure``."""
        self._uninterrupted.settle()
        return self._kept.error

    def run_uninterrupted(self, run: Callable[[], Value]) -> Value:
        """Call ``run`` as a section, and return its result or raise its exception (*Interrupts*)."""
        return self._uninterrupted.run(run)

    @section
    def load_plan(self, schedule: Schedule, states: Sequence[UnitState]) -> None:
        """Update ``states`` by ``schedule`` from the next update on, and reserve the slots that it needs.

        Call ``sync_states_to_host`` first, unless the units and their memory stay the same. Raise ``ScheduleError`` if
        ``schedule`` is not safe, or the device's out-of-memory error; then no unit has changed.
        """
        assert not self._pending
        self.end()
        # A lane may still copy into memory that is freed here, for an update that never started.
        self._lanes.drain()
        self._threads.drain()
        self._use(schedule, states)

    def _use(self, schedule: Schedule, states: Sequence[UnitState]) -> None:
        check_executable(schedule, states)
        # First: the worker may run one of them.
        self._forget_speculations()
        self._actions.set_units(schedule, states)
        self._elsewhere.set_units(states)
        # The new memory is used on other streams than the one that it was reserved on.
        self._lanes.wait_for_new_memory()
        self._issuer.set_schedule(schedule)

    @section
    def prefetch(self) -> None:
        """Load resident states, and fill each slot for the next update for the first time, during backward."""
        assert not self._pending
        if self._kept.error is None:
            with self._kept.keep():
                self._elsewhere.load()
                self._issuer.prefetch()

    @section
    def speculate(self, units: Sequence[int], steps: Sequence[AdamStep], ready: Event | None, reduced: Event) -> None:
        """Update eager ``units``, whose gradients are complete after ``reduced`` and, in host memory, ``ready``."""
        assert not self._pending
        if self._kept.error is None:
            with self._kept.keep():
                if self._assumed != tuple(steps):
                    self._forget_speculations()
                    for kernel in self._kernels:
                        kernel.assume_step(steps)
                    self._assumed = tuple(steps)
                for unit in units:
                    self._speculated_grads[unit] = self._actions.grads_of(unit)
                    self._issuer.speculate(unit, ready, reduced)

    @section
    def forget_speculations(self, units: Collection[int] | None = None) -> None:
        """Update eager ``units``, by default all, after ``begin``. The host waits for those being speculated."""
        with self._kept.keep():
            self._issuer.forget_speculations(units)

    def _forget_speculations(self) -> None:
        self._assumed = None
        self._speculated_grads.clear()
        self._issuer.forget_speculations()

    def _is_speculated(self, unit: int, steps: Sequence[AdamStep]) -> bool:
        """Return whether the step of ``unit`` that was speculated is the one of the update that has started."""
        grads = self._actions.grads_of(unit)
        return self._assumed == tuple(steps) and all(map(is_, self._speculated_grads[unit], grads))

    @section
    def sync_states_to_host(self) -> None:
        """Write states on the accelerator and in shadows back, unless an update has failed, for the caller to use."""
        assert not self._pending
        # Before the write-back, which runs on another stream than the updates.
        self.end()
        # A prefetch in flight is harmless: the next copy into its slot follows on the same stream.
        self._issuer.forget_prefetches()
        with self._kept.keep():
            self._forget_speculations()
            if self._kept.error is None:
                self._elsewhere.write_back()
        self._elsewhere.invalidate()

    @section
    def begin(self, steps: Sequence[AdamStep], prepare: Callable[[], object] = lambda: None) -> None:
        """Start an update: submit the first actions of the worker, and block the host for the caller's stream.

        ``steps`` holds one entry per sub-group, and ``prepare`` gives each unit its gradients. No other action is
        issued yet, because the caller may have to wait for the whole device first.
        """
        assert not self._pending
        assert self._kept.error is None
        self._issuer.begin()
        self._pending, self._flushing = True, False
        with self._kept.keep():
            # A write of the last update may have failed since.
            self._issuer.stop.raise_cause()
            # Inside: it may run out of memory, and the other ranks must know.
            prepare()
            self.kept_speculations = self._issuer.keep_speculations(lambda unit: self._is_speculated(unit, steps))
            self._assumed = None
            self._speculated_grads.clear()
            self._lanes.wait_for_caller(self._issuer.events)
            # After the wait: kernels of the last update may still read the hyperparameters that are overwritten here.
            for kernel in self._kernels:
                kernel.begin_step(steps)
            self._elsewhere.load()
            self._elsewhere.mark_updated()
            self._issuer.issue(self._issuer.first_of_caller)

    @property
    def may_advance(self) -> bool:
        return self.pending and self._kept.error is None and not self._issuer.has_issued_all

    @section
    def advance(self) -> None:
        """Issue the remaining actions. The host does not wait."""
        if self.may_advance:
            with self._kept.keep():
                self._issuer.issue_all()

    @property
    def has_published_all(self) -> bool:
        """Return whether no stream need wait for any unit: no update is in flight, or all units are published."""
        if not (self.pending or self._flushing):
            return True
        # The last one first: it is nearly always the one that is missing.
        positions = reversed(self._issuer.schedule.publishing.values())
        return self._kept.error is None and all(map(self._issuer.has_finished, positions))

    def publish(self, unit: int) -> None:
        """Make the current stream wait for the publication of ``unit``, and the host until the worker has issued it."""
        # If only a stream has waited, the current stream may be another one, still ahead of the update.
        if not (self.pending or self._flushing) or self._kept.error is not None:
            return
        position = self._issuer.schedule.publishing[unit]
        # A section takes tens of microseconds, and forward calls this for each module.
        if not self._issuer.is_brought_out(position):
            self._bring_out(position)
        if self._kept.error is None:
            self._device.current_stream().wait(self._issuer.finished_at(position))

    @section
    def _bring_out(self, position: int) -> None:
        with self._kept.keep():
            self._issuer.bring_out(position)

    def end(self, waiting: Waiter = Waiter.HOST) -> None:
        """Issue the remaining actions, and let the stream or the host wait until the update has ended.

        If only the current stream waits, backward may overwrite the gradients on that stream, and the next prefetches
        wait for the flushes out of their slots.
        """
        if self.pending or (self._flushing and waiting is Waiter.HOST):
            self._end(waiting)

    @section
    def _end(self, waiting: Waiter) -> None:
        if self._pending and self._kept.error is None:
            with self._kept.keep():
                self._issuer.finish()
                self._lanes.record_end(self._issuer.events)
                if waiting is Waiter.STREAM:
                    self._lanes.order_after_update()
                    self._issuer.carry_flushes()
                self._issuer.forget_prefetches()
                self._actions.shift_slots(self._issuer.slot_shift)
                self._flushing = True
        self._pending = False
        if waiting is Waiter.HOST:
            if self._flushing:
                # Also after a failure on another rank: a checkpoint is loaded into the memory that flushes write to.
                with self._kept.keep():
                    self._issuer.finish_writes()
                    self._lanes.wait_until_drained()
            self._issuer.forget_flushes()
            self._flushing = False

    def forget_replaced_tensors(self) -> None:
        """Free gradients and parameters of the last update that the caller has replaced since."""
        assert not self.pending
        self._actions.forget_replaced_tensors()

    @section
    def touch(self, tensors: Sequence[AdamTensors]) -> None:
        """Zero ``tensors`` on the threads that update them: the first touch of a page decides its NUMA node."""
        for group in tensors:
            self._threads[Lane.CPU].submit(partial(self._host_adam.zero, group)).result()

    def timeline_reader(self) -> Callable[[], Timeline]:
        """Return a function that reads the times of the last, finished update, until the second one after it starts."""
        return partial(self._issuer.events.timeline, self._issuer.schedule.actions)

    def failed_within(self, timeout_s: float) -> bool:
        """Return whether the update has failed, after waiting at most ``timeout_s`` for the host's part of it."""
        end_s = time.monotonic() + timeout_s
        if self._uninterrupted.settle(timeout_s):
            self._kept.wait_for_threads(max(0.0, end_s - time.monotonic()))
        return self._kept.error is not None

    def fail(self, cause: BaseException) -> None:
        """Record that the states are inconsistent because of ``cause``, on this rank or on another one."""
        self._uninterrupted.settle()
        self._kept.error = cause

    @section
    def clear_failure(self) -> None:
        """Allow updates again, after the caller has restored every state from a checkpoint."""
        self._pending = self._flushing = False
        self._kept.clear()
        self._elsewhere.invalidate()
        # They may disagree about the step count.
        for kernel in self._kernels:
            kernel.restart()

    def close(self) -> None:
        """End the threads, and free the slots. The executor cannot be used afterwards."""
        self._close()
        self._uninterrupted.close()

    @section
    def _close(self) -> None:
        if self._flushing:
            self.end()
        with suppress(Exception):
            self._forget_speculations()
        self._threads.close()
        # Prefetches for an update that never started may still write to slots that are freed here.
        with suppress(Exception):
            self._lanes.drain()
        self._actions.close()
        self._elsewhere.set_units(())
