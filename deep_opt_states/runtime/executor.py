"""Execute a schedule: loop over its actions in order, and decide nothing.

The caller's thread issues the actions between ``begin`` and ``end``, in the schedule's order, without waiting for
them (see ``issuer.py``). Meanwhile the caller continues training. It calls ``publish`` for parameters that it reads
next, and ``advance`` to enqueue the actions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from enum import Enum
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from deep_opt_states.device.interface import Device
from deep_opt_states.device.kernels.adam import AdamKernel, AdamStep, AdamTensors
from deep_opt_states.runtime.actions import Actions
from deep_opt_states.runtime.executable import check_executable
from deep_opt_states.runtime.failure import UpdateFailed
from deep_opt_states.runtime.issuer import Issuer
from deep_opt_states.runtime.lanes import LaneStreams
from deep_opt_states.runtime.resident_states import ResidentStates
from deep_opt_states.runtime.state import UnitState
from deep_opt_states.runtime.uninterrupted import Uninterrupted
from deep_opt_states.runtime.worker import CpuLane, Worker
from perf_model.prediction.timeline import Timeline
from perf_model.schedule.action import Lane
from perf_model.schedule.schedule import Schedule


class Waiter(Enum):
    """The one that waits until all units are updated and published."""

    STREAM = "stream"
    """The current stream, and not for flushes. The host waits for the worker alone."""
    HOST = "host"
    """The host, also for flushes."""


Arguments = ParamSpec("Arguments")
Value = TypeVar("Value")


def section(
    method: Callable[Concatenate[Executor, Arguments], Value],
) -> Callable[Concatenate[Executor, Arguments], Value]:
    """Return ``method``, which runs to its end even if a signal handler raises in the caller (``uninterrupted.py``)."""

    @wraps(method)
    def run(self: Executor, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Value:
        return self.run_uninterrupted(lambda: method(self, *args, **kwargs))

    return run


class Executor:
    """The runtime that executes one schedule per optimizer step, on the accelerator's streams and one worker thread.

    Streams and threads are reserved in the constructor, events and slots there and in ``load_plan``. An update
    allocates nothing. ``host_adam`` updates in host memory, and ``device_adam`` on the accelerator; it may be None if
    every unit is updated on the CPU. ``worker`` is the cpu lane, a new ``Worker`` by default. Every action is issued,
    or run by the worker, inside the context ``span(name)``. Raise ``ScheduleError`` if the schedule is not safe to
    execute.

    **Order of calls.** One thread makes all calls. ``begin`` starts an update and ``end`` ends it. Between them the
    caller may call ``publish``, ``may_advance`` and ``advance``, in any order and any number of times. ``prefetch``,
    ``sync_states_to_host``, ``load_plan``, ``forget_replaced_tensors`` and ``touch`` are called only while no update is
    pending. ``clear_failure`` is called after a failure, and ``close`` comes last.

    **Memory.** Between updates gradients and parameters belong to the caller: on every stream and thread if the host
    has waited in ``end``, and otherwise on the stream that was current there. Optimizer states do so after
    ``sync_states_to_host``, until ``prefetch`` or ``begin``. From ``begin`` to ``end`` gradients,
    optimizer states and parameters belong to the executor: the caller must neither write to gradients and states nor
    read parameters. The exception are the parameters of a unit, which may be read and written after ``publish``, on the
    stream that is current there. On any other stream, call ``publish`` first.

    **Failure.** Any exception in any lane is fatal for the update: parameters and states may already be updated for
    some units and not for others. The executor stops, waits for the operations in flight and keeps the exception
    in ``failure``. From then on ``prefetch``, ``publish``, ``advance`` and ``end`` issue nothing. They do
    not raise, since a rank that raised alone would leave the other ranks waiting in a collective: the caller reads
    ``failure`` and agrees with the other ranks first. No update may begin before all states have been restored from a
    checkpoint and ``clear_failure`` has been called.

    **Interrupts.** An exception that a signal handler raises, such as ``KeyboardInterrupt``, is no failure. It goes up
    at once, from any method. The method that it ends is a *section*, which runs to its end on a thread of its own; it
    does not begin if the interrupt came first. The update stays in flight, and the next call waits for the section
    before it does anything. So every wait can be repeated, and has the same result then. A signal handler may call any
    method itself.
    """

    def __init__(
        self,
        schedule: Schedule,
        states: Sequence[UnitState],
        device: Device[Any],
        host_adam: AdamKernel,
        device_adam: AdamKernel | None,
        worker: CpuLane | None = None,
        span: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        check_executable(schedule, states)
        self._device = device
        self._lanes = LaneStreams(device)
        streams = self._lanes.streams
        self._residents = ResidentStates(device, streams[Lane.H2D], streams[Lane.COMPUTE], streams[Lane.D2H])
        # Where slots are host memory, both are the same kernel, whose step begins once.
        self._kernels = tuple({id(adam): adam for adam in (host_adam, device_adam) if adam is not None}.values())
        self._host_adam = host_adam
        self._actions = Actions(device, host_adam, device_adam)
        self._pending = self._flushing = False
        self._failure: BaseException | None = None
        self._worker = worker or Worker(device.enter_thread)
        self._uninterrupted = Uninterrupted(device)
        self._issuer = Issuer(device, self._lanes, self._worker, self._actions.run, span)
        try:
            self._use(schedule, states)
        except BaseException:
            self._worker.close()
            self._uninterrupted.close()
            raise

    @property
    def pending(self) -> bool:
        """Return whether an update has begun and has not ended since, even if the update has failed."""
        self._uninterrupted.settle()
        return self._pending

    @property
    def flushing(self) -> bool:
        """Return whether only a stream has waited for the end of the update, so that its flushes may be in flight."""
        self._uninterrupted.settle()
        return self._flushing

    @property
    def failure(self) -> BaseException | None:
        """Return the exception that ended an update and left the states inconsistent, until ``clear_failure``."""
        self._uninterrupted.settle()
        return self._failure

    def run_uninterrupted(self, run: Callable[[], Value]) -> Value:
        """Call ``run`` as a section, and return its result or raise its exception: see *Interrupts* above.

        Anything that changes the state of the executor in several steps can be interrupted safely then.
        """
        return self._uninterrupted.run(run)

    @section
    def load_plan(self, schedule: Schedule, states: Sequence[UnitState]) -> None:
        """Update ``states`` by ``schedule`` from the next update on, and reserve the slots that it needs.

        The caller has called ``sync_states_to_host``, unless the units and their memory are the same as before. Raise
        ``ScheduleError`` if ``schedule`` is not safe to execute, or the device's out-of-memory error; then nothing has
        changed.
        """
        assert not self._pending
        check_executable(schedule, states)
        self.end()
        # A lane may still copy into a slot or into resident memory that is freed here, for an update that never began.
        self._lanes.drain()
        self._use(schedule, states)

    def _use(self, schedule: Schedule, states: Sequence[UnitState]) -> None:
        """Update ``states`` by ``schedule``, which is safe. If memory is short, nothing has changed."""
        self._actions.set_units(schedule, states)
        self._residents.set_units(states)
        self._issuer.reserve_events(schedule)
        # The new memory is used on other streams than the one that it was reserved on.
        self._lanes.wait_for_new_memory()
        self._issuer.set_schedule(schedule)

    @section
    def prefetch(self) -> None:
        """Issue the first prefetch into each slot for an update that has not begun, to overlap them with backward.

        Load resident states, too. The caller must not write to optimizer states before that update begins, unless it
        calls ``sync_states_to_host`` first.
        """
        assert not self._pending
        if self._failure is not None:
            return
        with self._keep_failure():
            self._residents.load()
            self._issuer.prefetch()

    @section
    def sync_states_to_host(self) -> None:
        """Make the states in host memory those of the last update, and let the caller read and write them.

        Resident states are written back. The update or ``prefetch`` copies resident and prefetched states again. After
        a failure, nothing is written.
        """
        assert not self._pending
        # The states are copied on another stream than the one that updates them.
        self.end()
        # A copy that is still in flight is harmless: the next copy into its slot follows on the same stream.
        self._issuer.forget_prefetches()
        if self._failure is None:
            with self._keep_failure():
                self._residents.write_back()
        self._residents.invalidate()

    @section
    def begin(self, steps: Sequence[AdamStep], prepare: Callable[[], object] = lambda: None) -> None:
        """Start an update: submit the first actions of the worker.

        ``steps`` has one entry per sub-group. ``prepare`` gives each unit the gradients of this update. The host waits
        for the caller's stream. Nothing else is issued before ``advance``, ``publish`` or ``end``, because the
        caller may have to wait for the whole device before it continues. A failure is kept in ``failure``, not raised.

        The class docstring has the rules for reading and writing tensors until ``end``.
        """
        assert not self._pending
        assert self._failure is None
        self._issuer.begin()
        self._pending, self._flushing = True, False
        with self._keep_failure():
            # Inside, because it may allocate: if memory is short on this rank, the other ranks must know.
            prepare()
            self._lanes.wait_for_caller(self._issuer.events)
            # After the wait: kernels of the update before, for which only a stream has waited, read the
            # hyperparameters that are overwritten here.
            for kernel in self._kernels:
                kernel.begin_step(steps)
            self._residents.load()
            self._residents.mark_updated()
            self._issuer.issue(self._issuer.first_of_caller)

    @property
    def may_advance(self) -> bool:
        """Return whether ``advance`` would issue anything."""
        return self.pending and self._failure is None and not self._issuer.has_issued_all

    @section
    def advance(self) -> None:
        """Issue the remaining actions. The host does not wait."""
        if self.may_advance:
            with self._keep_failure():
                self._issuer.issue_all()

    def publish(self, unit: int) -> None:
        """Issue the actions up to the publication of ``unit``, and make the current stream wait for it.

        For a CPU unit, the host waits until the worker has issued the publication.
        """
        # While the flushes are in flight, another stream than the one that has waited may still be ahead of the update.
        ended = not (self.pending or self.flushing)
        if ended or self._failure is not None:
            return
        position = self._issuer.schedule.publishing[unit]
        # Forward calls this for each module. A section takes some tens of microseconds.
        if not self._issuer.is_brought_out(position):
            self._bring_out(position)
        if self._failure is None:
            action = self._issuer.schedule.actions[position]
            self._device.current_stream().wait(self._issuer.events.finished[action.name])

    @section
    def _bring_out(self, position: int) -> None:
        with self._keep_failure():
            self._issuer.bring_out(position)

    def end(self, waiting: Waiter = Waiter.HOST) -> None:
        """Issue the remaining actions, and let the stream or the host wait until the update has ended.

        If the host waits, it may read states in host memory afterwards; an earlier call may have left flushes in
        flight. If only the current stream waits, backward may overwrite the gradients on that stream. The first
        prefetches of the next update wait on the h2d stream for flushes out of their slots.
        """
        # Readers of states call this also between updates.
        if self.pending or (self.flushing and waiting is Waiter.HOST):
            self._end(waiting)

    @section
    def _end(self, waiting: Waiter) -> None:
        if self._pending and self._failure is None:
            with self._keep_failure():
                self._issuer.finish()
                self._lanes.record_end(self._issuer.events)
                if waiting is Waiter.HOST:
                    self._lanes.wait_until_drained()
                else:
                    self._lanes.order_after_update()
                    self._issuer.carry_flushes()
                # All actions have been issued: prepare the prefetches for the next update.
                self._issuer.forget_prefetches()
                self._actions.shift_slots(self._issuer.slot_shift)
                self._flushing = waiting is Waiter.STREAM
        elif self._flushing and waiting is Waiter.HOST:
            # Even if the update has failed on another rank: states are then loaded into the memory that is flushed to.
            # Prefetches for the next update, which backward has begun, are not waited for.
            with self._keep_failure():
                self._lanes.wait_until_drained()
        self._pending = False
        if waiting is Waiter.HOST:
            self._issuer.forget_flushes()
            self._flushing = False

    def forget_replaced_tensors(self) -> None:
        """Drop the references to gradients and parameters of the last update that the caller has replaced since.

        They would take memory on the accelerator until the next update.
        """
        assert not self.pending
        self._actions.forget_replaced_tensors()

    @section
    def touch(self, tensors: Sequence[AdamTensors]) -> None:
        """Zero ``tensors``, which are in host memory, on the threads that update on the CPU.

        The first touch of a page decides its NUMA node, so this places the pages near these threads.
        """
        for group in tensors:
            self._worker.submit(partial(self._host_adam.zero, group)).result()

    def timeline_reader(self) -> Callable[[], Timeline]:
        """Return a function that returns when each action of the update that began last ran, once that has finished.

        Actions that were prefetched may have run before it began. The function may be called while the next update
        runs, until the update after that is prefetched or begins, which records the events again.
        """
        return partial(self._issuer.events.timeline, self._issuer.schedule.actions)

    def failed_within(self, timeout_s: float) -> bool:
        """Return whether the update has failed, after waiting at most ``timeout_s`` seconds for the host's part of it.

        This also works where ``end`` will not be called, such as when the process exits.
        """
        end_s = time.monotonic() + timeout_s
        if self._uninterrupted.settle(timeout_s):
            done, _ = wait(self._issuer.on_cpu.values(), max(0.0, end_s - time.monotonic()))
            failures = [failure for future in done if (failure := future.exception()) is not None]
            if self._failure is None and failures:
                self._failure = failures[0]
        return self._failure is not None

    def inconsistent_states_error(self) -> UpdateFailed:
        """Return the exception that every use of the states raises after a failed update, with its cause."""
        return UpdateFailed.because_of(self._failure)

    def fail(self, cause: BaseException) -> None:
        """Record that the states are inconsistent because of ``cause``, on this rank or on another one."""
        self._uninterrupted.settle()
        self._failure = cause

    @section
    def clear_failure(self) -> None:
        """Allow updates again, after the caller has restored every state from a checkpoint."""
        self._failure = None
        self._pending = self._flushing = False
        self._issuer.forget_flushes()
        self._issuer.on_cpu = {}
        self._issuer.forget_prefetches()
        self._residents.invalidate()

    def close(self) -> None:
        """End the threads, and free the slots. The executor cannot be used afterwards."""
        self._close()
        self._uninterrupted.close()

    @section
    def _close(self) -> None:
        if self._flushing:
            self.end()
        self._worker.close()
        # Prefetches for an update that never began may still write to the slots that are freed here. If the device has
        # failed, nothing is in flight.
        with suppress(Exception):
            self._lanes.drain()
        self._actions.close()
        self._residents.close()

    @contextmanager
    def _keep_failure(self) -> Iterator[None]:
        """Keep an exception that is raised inside in ``failure``, and stop the update. Sections call this."""
        try:
            yield
        except BaseException as error:  # noqa: BLE001 (kept until it is raised on all ranks)
            self._issuer.stop.set()
            # At once: if the following lines wait for ever, the end of the process still reports it.
            self._failure = error
            self._failure = self._issuer.first_error(error)
            # Operations that were issued before the failure still write to states, into which a checkpoint will be
            # loaded, and still use slots, which will be freed. If the device fails here, too, then the failure that is
            # kept already reports it.
            with suppress(Exception):
                self._lanes.drain()
            self._issuer.forget_prefetches()
