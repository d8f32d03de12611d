"""Execute a schedule: loop over its actions in order, and decide nothing.

Each lane is one stream or one thread, so that all lanes can overlap: the h2d, compute, d2h and publish lanes are
streams, and the cpu lane is a worker thread. Where an action waits for an action on a stream, an event holds back its
stream, and the host continues. A stream cannot wait for a thread, so the worker itself issues what waits for it: the
PUBLISH of a unit, as soon as its CPU_STEP has ended. No action on the accelerator waits for the CPU otherwise.

The caller's thread issues all other actions between ``begin`` and ``finish``, in the schedule's order. Meanwhile the
caller continues training. It calls ``publish`` for parameters that it reads next, and ``advance`` to enqueue the
actions.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

from deep_opt_states.device.interface import Device, Event, Stream
from deep_opt_states.device.kernels.adam import AdamKernel, AdamStep, AdamTensors
from deep_opt_states.runtime.action_events import ActionEvents
from deep_opt_states.runtime.actions import Actions
from deep_opt_states.runtime.early_update import EarlyBuffers, EarlyUpdate
from deep_opt_states.runtime.resident_states import ResidentStates
from deep_opt_states.runtime.state import Split, UnitState
from deep_opt_states.runtime.worker import CpuLane, Worker
from perf_model.prediction.timeline import Timeline
from perf_model.schedule.action import Action, ActionKind, Lane
from perf_model.schedule.check import ScheduleError, check
from perf_model.schedule.schedule import Schedule
from perf_model.schedule.workload import Workload

PUBLISHING = (ActionKind.GPU_STEP, ActionKind.PUBLISH)
"""The kinds of action that write a unit's 16-bit parameters. Each unit has exactly one such action."""


class UpdateFailed(RuntimeError):
    """The error for an update that was applied only in part: some units are updated, others are not."""


class Executor:
    """The runtime that executes one schedule per optimizer step, on the accelerator's streams and one worker thread.

    Streams and the worker are reserved in the constructor, events and slots there, in ``set_units`` and in
    ``set_schedule``. An update allocates nothing. ``host_adam`` updates in host memory, and ``device_adam`` on the
    accelerator; it may be None if every unit is updated on the CPU. ``worker`` is the cpu lane, a new ``Worker`` by
    default. ``splits`` has the ranges of each unit that ``begin`` updates early; by default there are none. Every
    action is issued, or run by the worker, inside the context ``span(name)``. Raise ``ScheduleError`` if the schedule
    is not safe to execute.

    **Order of calls.** One thread makes all calls. ``begin`` starts an update and ``finish`` ends it; ``run`` does
    both. ``finish_on_stream`` ends it, too, but leaves its flushes in flight. Between them the caller may call
    ``publish``, ``publish_early_ranges``, ``mark_requested``, ``may_block``, ``may_advance`` and ``advance``, in any
    order and any number of times. ``prefetch``, ``give_states_back``, ``set_units``, ``set_schedule`` and ``touch`` are
    called only while no update is pending, and ``close`` comes last.

    **Memory.** Between updates gradients and parameters belong to the caller: on every stream and thread after
    ``finish``, and on the stream that was current in ``finish_on_stream`` after that. Optimizer states do so after
    ``finish`` and ``give_states_back``, until ``prefetch`` or ``begin``. From ``begin`` to ``finish`` gradients,
    optimizer states and parameters belong to the executor: the caller must neither write to gradients and states nor
    read parameters. There are two exceptions: the parameters of early ranges may be read and written once ``begin`` has
    returned, and the parameters of a unit may be read after ``publish``, both only on the stream that is current
    in ``begin`` or ``publish``. On any other stream, call ``publish_early_ranges`` or ``publish`` first. ``finish``
    blocks the host until nothing is in flight, so that afterwards every stream and thread may use the tensors.

    **Failure.** Any exception in any lane is fatal for the update: parameters and states may already be updated for
    some units and not for others. The executor stops, waits for the operations in flight and keeps the exception
    in ``failure``. From then on ``prefetch``, ``publish``, ``advance`` and ``finish`` issue nothing. Only ``run``
    raises ``UpdateFailed``. The other methods do not, since a rank that raised alone would leave the other ranks
    waiting in a collective; their caller reads ``failure`` and agrees with the other ranks first. No update may begin
    before all states have been restored from a checkpoint and ``forget_failure`` has been called. Exceptions that are
    not an ``Exception``, such as an interrupt, are kept and also raised at once.
    """

    def __init__(
        self,
        schedule: Schedule,
        states: Sequence[UnitState],
        device: Device[Any],
        host_adam: AdamKernel,
        device_adam: AdamKernel | None,
        worker: CpuLane | None = None,
        splits: Sequence[Split] | None = None,
        span: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        _check(schedule, states)
        self._device = device
        self._host_adam = host_adam
        self._device_adam = device_adam
        self._span = span
        self._streams: dict[Lane, Stream[Any]] = {lane: device.stream() for lane in Lane if lane is not Lane.CPU}
        """One stream per lane: h2d overlaps prefetches with everything else, compute overlaps the update with the
        transfers, d2h overlaps flushes and the copies of gradients with transfers in the other direction, and publish
        lets the small publications overtake prefetches."""
        self._reserved = device.event()
        """Caller's stream -> all lanes: memory that was allocated since is free of the caller's kernels."""
        self._drained: dict[Lane, Event] = {lane: device.event() for lane in self._streams}
        """Each lane's stream -> host: everything that was issued on it has finished."""
        self._residents = ResidentStates(
            device, self._streams[Lane.H2D], self._streams[Lane.COMPUTE], self._streams[Lane.D2H]
        )
        self._actions = Actions(device, host_adam, device_adam)
        self._early_buffers: EarlyBuffers | None = None
        self._prefetched: set[str] = set()
        """Names of the actions that ``prefetch`` has issued, which the update does not issue again."""
        self.pending = False
        """Whether an update has begun and has not ended since, even if the update has failed."""
        self.flushing = False
        """Whether the update has ended by ``finish_on_stream``, so that its flushes may be in flight."""
        self._carried: dict[str, Event] = {}
        """d2h stream -> h2d stream: flushes of the last update, by the name of the first prefetch that waits for them
        since ``finish`` has not."""
        self._worker = worker or Worker(device.enter_thread)
        try:
            self._use(schedule, states, splits)
        except BaseException:
            self._worker.close()
            raise
        self._stop = threading.Event()
        """Set by a failure: the host issues no further action, and the worker starts none."""
        self._on_cpu: dict[str, Future[None]] = {}
        """The futures of this update's tasks of the worker, by the action's name. ``publish`` and ``finish`` wait for
        them; without them an exception of the worker would be lost."""
        self._issued = self._requested = 0
        """Positions in the schedule: the actions before ``_issued`` have been issued, and every rank has requested the
        publication of the CPU units whose PUBLISH is before ``_requested``."""
        self.failure: BaseException | None = None
        """The exception that ended an update and left the states inconsistent, until ``forget_failure``."""

    def set_units(self, schedule: Schedule, states: Sequence[UnitState], splits: Sequence[Split] | None = None) -> None:
        """Update ``states`` by ``schedule`` from the next update on, and reserve the slots that it needs.

        The caller has called ``write_back`` for units that are no longer resident, or were cut elsewhere. The rules and
        errors are those of ``set_schedule``.
        """
        assert not self.pending
        _check(schedule, states)
        self.finish()
        # A lane may still copy into a slot or into resident memory that is freed here, for an update that never began.
        self._drain_streams()
        self._use(schedule, states, splits)

    def _use(self, schedule: Schedule, states: Sequence[UnitState], splits: Sequence[Split] | None) -> None:
        """Update ``states`` by ``schedule``, which is safe. If memory is short, nothing has changed."""
        splits = splits or [Split.create(state.elements) for state in states]
        # Only on this rank. ``self._splits`` decides which collectives forward calls, and is the same on every rank.
        here = [
            Split.all_early(state.elements) if state.is_evicted else split
            for state, split in zip(states, splits, strict=True)
        ]
        early_update = EarlyUpdate(states, here, self._device, self._streams, self._worker, self._early_buffers)
        self._actions.set_units(schedule, states, here)
        self._early_update, self._early_buffers = early_update, early_update.buffers
        self._states, self._splits = states, splits
        self._residents.set_units(states)
        on_streams = [action.name for action in schedule.actions if action.lane is not Lane.CPU]
        # There are two sets: the timeline of one update can still be read while the next one records the other set.
        self._events, self._next_events = (ActionEvents(self._device, on_streams) for _ in range(2))
        self._adopt(schedule)

    def set_schedule(self, schedule: Schedule) -> None:
        """Execute ``schedule`` from the next update on, and reserve or free slots as it needs them.

        ``schedule`` must have the same units and placements, and the same order on every rank. Raise ``ScheduleError``
        if it is not safe to execute, or the device's out-of-memory error; then nothing has changed.
        """
        assert not self.pending
        _check(schedule, self._states)
        self.finish()
        if schedule.num_slots < self._actions.num_slots:
            # A lane may still copy into a slot that is freed here. The next owner of the memory must not receive it.
            self._drain_streams()
        self._actions.reserve_slots_for(schedule)
        self._adopt(schedule)

    def _adopt(self, schedule: Schedule) -> None:
        """Derive from ``schedule``, whose slots are reserved, what an update needs."""
        self._lanes_wait_for_caller()
        self._prefetched.clear()
        self._schedule = schedule
        self._publishing = {
            action.unit: position for position, action in enumerate(schedule.actions) if action.kind in PUBLISHING
        }
        self._on_streams_from = next(
            (at for at, action in enumerate(schedule.actions) if action.lane not in (Lane.CPU, Lane.PUBLISH)),
            len(schedule.actions),
        )
        """The number of actions of the worker that precede the first action that the caller issues."""
        self._first_prefetches = [
            action for action in schedule.actions if action.kind is ActionKind.PREFETCH and not action.waits
        ]
        """The prefetches that fill the slots. Any other one waits for an action of the same update."""
        last_flush = {action.slot: action.name for action in schedule.actions if action.kind is ActionKind.FLUSH_STATES}
        self._flushes_before = {action.name: last_flush[action.slot] for action in self._first_prefetches}
        """The flush of the update before that a first prefetch waits for: the last one from its slot. Flushes run in
        order, so the states that the prefetch reads, which were flushed from the same slot, are in host memory, too."""

    def run(self, steps: Sequence[AdamStep]) -> None:
        """Run one whole update, and return when every action has finished.

        ``steps`` has one entry per sub-group. Raise ``UpdateFailed``, with its cause, if this or an earlier update has
        failed.
        """
        if self.failure is None:
            self.begin(steps)
            self.finish()
        if self.failure is not None:
            raise self.inconsistent_states_error()

    def prefetch(self) -> None:
        """Issue the first prefetch into each slot for an update that has not begun, to overlap them with backward.

        Load resident states, too. The caller must not write to optimizer states before that update begins, unless it
        calls ``give_states_back`` first.
        """
        assert not self.pending
        if self.failure is not None:
            return
        with self._keep_failure():
            self._residents.load()
            for action in self._first_prefetches:
                if action.name not in self._prefetched:
                    self._on_stream(action, self._next_events)
                    self._prefetched.add(action.name)

    def give_states_back(self) -> None:
        """Make the states in host memory those of the last update, and let the caller read and write them.

        Resident states are written back. They and the prefetched states are copied again, by the update or by
        ``prefetch``.
        """
        assert not self.pending
        assert not self.flushing
        # A copy that is still in flight is harmless: the next copy into its slot follows on the same stream.
        self._prefetched.clear()
        if self.failure is None:
            with self._keep_failure():
                self._residents.write_back()
        self._residents.invalidate()

    def write_back(self, units: Sequence[UnitState] | None = None) -> None:
        """Make the states of the resident ``units`` in host memory those of the last update, as ``set_units`` requires.

        None stands for all units. Nothing is loaded again: the caller neither reads nor writes them. After a failure,
        nothing is written.
        """
        assert not self.pending
        # The states are copied on another stream than the one that updates them.
        self.finish()
        if self.failure is None:
            with self._keep_failure():
                self._residents.write_back(units)

    def begin(self, steps: Sequence[AdamStep]) -> None:
        """Begin an update: update and publish the early ranges, and submit the first actions of the worker.

        ``steps`` has one entry per sub-group. The host waits for the caller's stream, and for the early ranges that are
        updated in host memory. Nothing else is issued before ``advance``, ``publish`` or ``finish``, because the caller
        may have to wait for the whole device before it continues. A failure is kept in ``failure``, not raised.

        The class docstring has the rules for reading and writing tensors until ``finish``.
        """
        assert not self.pending
        assert self.failure is None
        self._stop.clear()
        self._on_cpu = {}
        self._issued = self._requested = 0
        self._events, self._next_events = self._next_events, self._events
        self.pending, self.flushing = True, False
        with self._keep_failure():
            self._wait_for_caller()
            # After the wait: kernels of the update before, which ``finish_on_stream`` left to the stream, read the
            # hyperparameters that are overwritten here.
            for kernel in {id(kernel): kernel for kernel in (self._host_adam, self._device_adam)}.values():
                if kernel is not None:
                    kernel.begin_step(steps)
            self._residents.load()
            self._residents.mark_updated()
            self._early_update.update(self._host_adam, self._device_adam)
            self._issue(self._on_streams_from)

    @property
    def may_advance(self) -> bool:
        """Return whether ``advance`` would issue anything."""
        return self.pending and self.failure is None and self._issued < len(self._schedule.actions)

    def advance(self) -> None:
        """Issue the remaining actions. The host does not wait."""
        if self.may_advance:
            with self._keep_failure():
                self._issue(len(self._schedule.actions))

    def publish(self, unit: int) -> None:
        """Issue the actions up to the publication of ``unit``, and make the current stream wait for it.

        For a CPU unit, the host waits until the worker has issued the publication.
        """
        # While the flushes are in flight, another stream than the one that has waited may still be ahead of the update.
        ended = not (self.pending or self.flushing)
        if ended or self.failure is not None or not self._splits[unit].rest:
            return
        position = self._publishing[unit]
        action = self._schedule.actions[position]
        with self._keep_failure():
            self._issue(position + 1)
            # If the update on the CPU has failed, its exception is raised here, and not only at the end.
            for name in (*action.waits, action.name):
                self._wait_for_worker(name)
            self._device.current_stream().wait(self._events.finished[action.name])

    def publish_early_ranges(self) -> None:
        """Make the current stream wait for the parameters of all early ranges."""
        if self.pending or self.flushing:
            self._early_update.wait()

    def may_block(self, unit: int) -> bool:
        """Return whether the host may have to wait in ``publish(unit)`` while an update is pending.

        That is so for a CPU unit unless every rank has requested it, or a unit that the worker updates after it. The
        result is the same on every rank: it depends only on the placements, the order, and the units that were passed
        to ``mark_requested``. The progress of this rank's worker, a failure or an end of the update on this rank, and
        the number of slots do not matter.
        """
        position = self._publishing[unit]
        on_cpu = self._schedule.actions[position].lane is Lane.PUBLISH
        return on_cpu and bool(self._splits[unit].rest) and position >= self._requested

    def mark_requested(self, unit: int) -> None:
        """Record that every rank is about to publish the parameters of ``unit``."""
        position = self._publishing[unit]
        if self._schedule.actions[position].lane is Lane.PUBLISH:
            self._requested = max(self._requested, position + 1)

    def finish_on_stream(self) -> None:
        """Issue the remaining actions, and make the current stream wait until all units are updated and published.

        The host waits only for the worker. Backward may then overwrite the gradients on that stream, while flushes are
        in flight. The first prefetches, which write to their slots, wait for them on the h2d stream. ``finish`` makes
        the host wait for them, before the caller reads states in host memory.
        """
        if self.pending and self.failure is None:
            with self._keep_failure():
                self._issue(len(self._schedule.actions))
                for name in self._on_cpu:
                    self._wait_for_worker(name)
                self._record_end()
                self._order_after_update()
                finished = self._events.finished
                self._carried = {prefetch: finished[flush] for prefetch, flush in self._flushes_before.items()}
                self._prefetched.clear()
                self.flushing = True
        self.pending = False

    def finish(self) -> None:
        """Issue the remaining actions, and block the host until every action of the update has finished.

        After ``finish_on_stream``, wait for the flushes that it has left in flight.
        """
        if self.pending and self.failure is None:
            with self._keep_failure():
                self._issue(len(self._schedule.actions))
                for name in self._on_cpu:
                    self._wait_for_worker(name)
                self._record_end()
                self._wait_until_drained()
                self._prefetched.clear()
        elif self.flushing:
            # Even if the update has failed on another rank: states are then loaded into the memory that is flushed to.
            # Prefetches for the next update, which backward has begun, are not waited for.
            with self._keep_failure():
                self._wait_until_drained()
        self._carried.clear()
        self.pending = self.flushing = False

    def touch(self, tensors: Sequence[AdamTensors]) -> None:
        """Zero ``tensors``, which are in host memory, on the threads that update on the CPU.

        The first touch of a page decides its NUMA node, so this places the pages near these threads.
        """
        for group in tensors:
            self._worker.submit(partial(self._host_adam.zero, group)).result()

    def timeline(self) -> Timeline:
        """Return when each action of the last update ran.

        The update must have finished. Actions that were prefetched may have run before it began.
        """
        return self.timeline_reader()()

    def timeline_reader(self) -> Callable[[], Timeline]:
        """Return a function that returns the ``timeline`` of the update that began last, once that has finished.

        The function may be called while the next update runs, until the update after that is prefetched or begins,
        which records the events again.
        """
        return partial(self._events.timeline, self._schedule.actions)

    def failed_within(self, timeout_s: float) -> bool:
        """Return whether the update has failed, after waiting at most ``timeout_s`` seconds for the worker.

        This also works where ``finish`` will not be called, such as when the process exits.
        """
        done, _ = wait(self._on_cpu.values(), timeout_s)
        failures = [failure for future in done if (failure := future.exception()) is not None]
        if self.failure is None and failures:
            self.fail(failures[0])
        return self.failure is not None

    def inconsistent_states_error(self) -> UpdateFailed:
        """Return the exception that every use of the states raises after a failed update.

        Its cause is the failure itself, with the traceback.
        """
        error = UpdateFailed(
            f"The optimizer update was applied only in part ({type(self.failure).__name__}: {self.failure}). "
            f"Parameters and optimizer states are inconsistent, since some are updated and others are not: they will "
            f"not be used or saved. Fix the cause below, and continue from the last checkpoint."
        )
        error.__cause__ = self.failure
        return error

    def fail(self, cause: BaseException) -> None:
        """Record that the states are inconsistent because of ``cause``, on this rank or on another one."""
        self.failure = cause

    def forget_failure(self) -> None:
        """Allow updates again, after the caller has restored every state from a checkpoint."""
        self.failure = None
        self.pending = self.flushing = False
        self._carried.clear()
        self._on_cpu = {}
        self._prefetched.clear()
        self._residents.invalidate()

    def close(self) -> None:
        """End the worker, and free the slots. The executor cannot be used afterwards."""
        if self.flushing:
            self.finish()
        self._worker.close()
        self._actions.close()
        self._residents.close()
        self._states = ()

    def _lanes_wait_for_caller(self) -> None:
        """Make all lanes wait for the caller's stream, on which new memory is allocated.

        The allocator may have reused memory that kernels on that stream still read or write.
        """
        self._device.current_stream().record(self._reserved)
        for stream in self._streams.values():
            stream.wait(self._reserved)

    def _wait_for_caller(self) -> None:
        """Block the host until the caller's stream is done, so that nothing issued later can start before that.

        Backward's kernels may still read the 16-bit parameters, and gradients may still be copied to host memory, where
        the worker reads them. DeepSpeed has joined its reduction stream to the caller's stream by then. The clocks of
        the host and of the device get a common origin here.
        """
        self._device.current_stream().record(self._events.origin)
        self._events.origin.synchronize()
        self._events.origin_s = time.perf_counter()

    def _issue(self, until: int) -> None:
        """Issue the actions before position ``until``. The host does not wait."""
        while self._issued < until and not self._stop.is_set():
            action = self._schedule.actions[self._issued]
            if not self._on_cpu.keys().isdisjoint(action.waits) or action.lane is Lane.CPU:
                self._on_cpu[action.name] = self._worker.submit(partial(self._on_worker, action))
            elif action.name not in self._prefetched:
                self._on_stream(action, self._events)
            self._issued += 1

    def _wait_for_worker(self, name: str) -> None:
        """Block the host until the worker has run or issued the action ``name``, if that is the worker's."""
        if name in self._on_cpu:
            self._on_cpu[name].result()

    def _on_stream(self, action: Action, events: ActionEvents) -> None:
        stream = self._streams[action.lane]
        if action.name in self._carried:
            stream.wait(self._carried.pop(action.name))
        for name in action.waits:
            # CPU steps have no event: the worker, which runs them, also issues the actions that wait for them.
            if name in events.finished:
                stream.wait(events.finished[name])
        stream.record(events.started[action.name])
        with stream.issue(), self._span(action.name):
            self._actions.run(action)
        stream.record(events.finished[action.name])

    def _on_worker(self, action: Action) -> None:
        if self._stop.is_set():
            return
        try:
            if action.lane is not Lane.CPU:
                self._on_stream(action, self._events)
                return
            for name in action.waits:
                self._events.finished[name].synchronize()
            start_s = time.perf_counter()
            with self._span(action.name):
                self._actions.run(action)
            origin_s = self._events.origin_s
            self._events.on_worker[action.name] = (start_s - origin_s, time.perf_counter() - origin_s)
        except BaseException:
            # From here on the host must not issue another action, and the worker must not start one.
            self._stop.set()
            raise

    def _drain_streams(self) -> None:
        """Block the host until nothing is in flight on any lane.

        The next forward gathers parameters on a stream of DeepSpeed that does not wait for our streams.
        """
        self._record_drained()
        self._wait_until_drained()

    def _record_end(self) -> None:
        """Record that the update ends here on each lane."""
        self._record_drained()
        self._streams[Lane.D2H].record(self._events.flushed)

    def _record_drained(self) -> None:
        for lane, stream in self._streams.items():
            stream.record(self._drained[lane])

    def _order_after_update(self) -> None:
        """Make the current stream wait for the updates and publications before ``_drained``, but not for flushes."""
        for lane in (Lane.COMPUTE, Lane.PUBLISH):
            self._device.current_stream().wait(self._drained[lane])

    def _wait_until_drained(self) -> None:
        """Block the host until everything has finished that was in flight when ``_drained`` was recorded."""
        for event in self._drained.values():
            event.synchronize()

    @contextmanager
    def _keep_failure(self) -> Iterator[None]:
        """Keep an exception that is raised inside in ``failure``, and stop the update.

        Raise it only if it is not an ``Exception``, such as an interrupt.
        """
        try:
            yield
        except BaseException as error:
            self._stop.set()
            # The failure is kept at once, because the following lines wait and may be interrupted.
            self.fail(error)
            self.fail(self._first_error(error))
            # Operations that were issued before the failure still write to states, into which a checkpoint will be
            # loaded, and still use slots, which will be freed. If the device fails here, too, then the failure that is
            # kept already reports it.
            with suppress(Exception):
                self._drain_streams()
            self._prefetched.clear()
            if not isinstance(error, Exception):
                raise

    def _first_error(self, error: BaseException) -> BaseException:
        """Return the worker's exception if there is one, since ``error`` may only follow from it; otherwise ``error``.

        Wait for the worker to finish its actions.
        """
        failures = [failure for future in self._on_cpu.values() if (failure := future.exception()) is not None]
        return failures[0] if failures else error


def _check(schedule: Schedule, states: Sequence[UnitState]) -> None:
    """Raise ``ScheduleError`` if ``schedule`` is not safe for ``states`` and their placements, or cannot be executed.

    The worker issues the actions that wait for a CPU step, so these must be the publications, each with its own wait.
    Nothing else may wait for them, because a stream can wait only for an event that was recorded before.
    """
    placements = check(schedule, Workload.from_numels(state.numel for state in states))
    of_cpu_units = {action.name for action in schedule.actions if action.lane in (Lane.CPU, Lane.PUBLISH)}
    for action in schedule.actions:
        expected = [f"{ActionKind.CPU_STEP.value} {action.unit}"] if action.kind is ActionKind.PUBLISH else []
        found = [name for name in action.waits if name in of_cpu_units]
        if found != expected:
            rule = "PUBLISH names the CPU_STEP of its unit among its waits, and no other action waits for a CPU unit."
            raise ScheduleError(schedule, action, rule)
    assert placements == tuple(state.placement for state in states), placements
