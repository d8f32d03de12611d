"""Executes a schedule: a loop over its actions, no decisions.

Lanes h2d, compute and d2h are a stream each, so that transfers in both directions and the update overlap; the
cpu lane is a worker thread. An action that waits for a stream's action is held back on its stream by an event;
one that waits for the cpu lane is not issued before the worker is done, since no stream can wait for a thread.

All is issued by the caller's thread, in the schedule's order, from ``begin`` to ``finish``. In between the caller goes
on: ``publish`` is for what it reads next, and ``advance`` keeps the streams busy.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from itertools import accumulate
from typing import Any

from deep_opt_states.device.interface import Device, Event, Stream
from deep_opt_states.device.kernels.adam import AdamKernel, AdamStep
from deep_opt_states.runtime.actions import Actions
from deep_opt_states.runtime.early_update import FirstParts
from deep_opt_states.runtime.state import Split, SubGroupState
from deep_opt_states.runtime.worker import CpuLane, Worker
from perf_model.prediction.timeline import Span, Timeline
from perf_model.schedule.action import Action, ActionKind, Lane
from perf_model.schedule.check import check
from perf_model.schedule.happens_before import CHAINS
from perf_model.schedule.schedule import Schedule
from perf_model.schedule.workload import Workload

PUBLISHING = (ActionKind.GPU_STEP, ActionKind.PUBLISH)
"""Each sub-group has one of them, which writes its 16-bit parameters."""

_PLACEMENTS = {chain[0]: placement for placement, chain in CHAINS.items()}
"""By the first action of a sub-group."""


class UpdateFailed(RuntimeError):
    """An update stopped half way: some sub-groups are updated, others are not."""


class Marks:
    """Events around each action of one update that runs on a stream, and the times of those that the worker runs."""

    def __init__(self, device: Device[Any], names: Sequence[str]) -> None:
        self.started: dict[str, Event] = {name: device.event() for name in names}
        self.finished: dict[str, Event] = {name: device.event() for name in names}
        self.origin = device.event()
        self.origin_s = 0.0
        self.on_worker: dict[str, tuple[float, float]] = {}

    def timeline(self, actions: Sequence[Action]) -> Timeline:
        """Return when each of the actions ran, all of which have finished."""
        spans = []
        for action in actions:
            if action.lane is Lane.CPU:
                start_s, end_s = self.on_worker[action.name]
            else:
                start_s = self.started[action.name].seconds_after(self.origin)
                end_s = self.finished[action.name].seconds_after(self.origin)
            spans.append(Span(action, start_s, end_s))
        return Timeline(tuple(spans))


class Executor:
    """Reserves streams, events and the worker once, slots here and in ``use``; an update reserves nothing.

    ``schedule`` is executed until ``use`` gives another; ``host_adam`` updates in host memory, ``device_adam`` in
    slots; ``worker`` is the cpu lane. ``splits`` say what of each sub-group ``begin`` updates at once, which is nothing
    without them. An action is issued, or run by the worker, inside a ``span`` of its name. Raises ``ScheduleError`` for
    a schedule that is not safe to execute.

    A failure of any lane ends the update and is kept in ``failure``: the states are torn between two steps, and nothing
    is updated before ``forget_failure``. Only ``run`` raises it; a caller that must not stop alone asks.
    """

    def __init__(
        self,
        schedule: Schedule,
        states: Sequence[SubGroupState],
        device: Device[Any],
        host_adam: AdamKernel,
        device_adam: AdamKernel | None,
        worker: CpuLane | None = None,
        splits: Sequence[Split] | None = None,
        span: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._states = states
        self._device = device
        self._host_adam = host_adam
        self._device_adam = device_adam
        self._splits = splits or [Split.of(state.numel) for state in states]
        self._span = span
        self._streams: dict[Lane, Stream[Any]] = {}
        self._actions = Actions(states, self._splits, device, host_adam, device_adam)
        self._prefetched: set[str] = set()
        self.pending = False
        """Whether an update has begun and ``finish`` was not called, also if it has failed."""
        self.use(schedule)
        self._streams = {lane: device.stream() for lane in Lane if lane is not Lane.CPU}
        self._reserved = device.event()
        self._lanes_wait_for_caller()
        on_streams = [action.name for action in schedule.actions if action.lane is not Lane.CPU]
        self._marks, self._next_marks = Marks(device, on_streams), Marks(device, on_streams)
        self._drained: dict[Lane, Event] = {lane: device.event() for lane in self._streams}
        self._worker = worker or Worker(device.enter_thread)
        begins_with = {action.sub_group: action.kind for action in reversed(schedule.actions)}
        first = [
            (_PLACEMENTS[begins_with[index]], index, part)
            for index, split in enumerate(self._splits)
            for part in split.first
        ]
        self._first_parts = FirstParts(first, states, device, self._streams, self._worker)
        self._stop = threading.Event()
        self._updated: dict[str, Future[None]] = {}
        self._issued = self._asked_for = 0
        self.failure: BaseException | None = None

    def use(self, schedule: Schedule) -> None:
        """From the next update on, with more or fewer slots, which are reserved or given back here.

        ``schedule`` is of the same placements, in an order that is the same on every rank. Raises ``ScheduleError``, or
        what the device raises that has no room; nothing has changed then.
        """
        assert not self.pending
        check(schedule, Workload.of([state.numel for state in self._states]))
        if schedule.num_slots < self._actions.num_slots:
            # What a lane still copies into a slot must not end up in its next owner's memory.
            self._drain_streams()
        self._actions.use_slots_of(schedule)
        if self._streams:
            self._lanes_wait_for_caller()
        self.discard()
        self._schedule = schedule
        self._publishing = {
            action.sub_group: position for position, action in enumerate(schedule.actions) if action.kind in PUBLISHING
        }
        self._on_streams_from = next(
            (position for position, action in enumerate(schedule.actions) if action.lane is not Lane.CPU),
            len(schedule.actions),
        )
        """How many actions of the worker come first."""
        on_cpu = {action.name for action in schedule.actions if action.lane is Lane.CPU}
        waiting = [not on_cpu.isdisjoint(action.waits) for action in schedule.actions]
        self._waiting_before = list(accumulate(waiting, initial=0))
        """By position: how many actions before it wait for the worker."""

    def run(self, steps: Sequence[AdamStep]) -> None:
        """One update phase; returns when every action has finished. Raises ``UpdateFailed`` from what has failed."""
        if self.failure is None:
            self.begin(steps)
            self.finish()
        if self.failure is not None:
            raise self.torn()

    def prefetch(self) -> None:
        """What the slots hold first of an update that has not begun. The states must not be written to before it has,
        or ``discard`` be called."""
        assert not self.pending
        if self.failure is not None:
            return
        with self._torn_by_failure():
            for action in self._schedule.actions:
                # Those that wait take over a slot.
                if action.kind is ActionKind.PREFETCH and not action.waits and action.name not in self._prefetched:
                    self._on_stream(action, self._next_marks)
                    self._prefetched.add(action.name)

    def discard(self) -> None:
        """Somebody is about to write to the states in host memory: what was prefetched will be prefetched again."""
        # A copy that is still under way is harmless: the next one into its slot is on the same stream.
        self._prefetched.clear()

    def begin(self, steps: Sequence[AdamStep]) -> None:
        """Of an update with one entry of ``steps`` a sub-group: the first parts, and what the worker does first.

        Nothing else is issued before ``advance``, ``publish`` or ``finish``: the caller may have to wait for the whole
        device before it goes on.

        From now on gradients and states must not be written to, nor parameters be read, before ``finish``; but the
        first parts' may be read at once, and a sub-group's after ``publish``, each on the stream that is current there.
        """
        assert not self.pending
        assert self.failure is None
        self._stop.clear()
        self._updated = {}
        self._issued = self._asked_for = 0
        self._marks, self._next_marks = self._next_marks, self._marks
        self.pending = True
        with self._torn_by_failure():
            for kernel in {id(kernel): kernel for kernel in (self._host_adam, self._device_adam)}.values():
                if kernel is not None:
                    kernel.begin_step(steps)
            self._wait_for_caller()
            self._first_parts.update(self._host_adam, self._device_adam)
            self._issue(self._on_streams_from, blocks=False)

    def may_advance(self) -> bool:
        """Whether ``advance`` would issue anything."""
        if not self.pending or self.failure is not None or self._issued == len(self._schedule.actions):
            return False
        following = self._schedule.actions[self._issued]
        return all(self._updated[name].done() for name in following.waits if name in self._updated)

    def advance(self) -> None:
        """Issue what no longer has to wait for the worker."""
        if self.pending and self.failure is None:
            with self._torn_by_failure():
                self._issue(len(self._schedule.actions), blocks=False)

    def publish(self, sub_group: int) -> None:
        """The current stream waits for the sub-group's parameters; the host for the worker, if it updates them."""
        if not self.pending or self.failure is not None or not self._splits[sub_group].rest:
            return
        position = self._publishing[sub_group]
        with self._torn_by_failure():
            self._issue(position + 1, blocks=True)
            self._device.current_stream().wait(self._marks.finished[self._schedule.actions[position].name])

    def publish_first_parts(self) -> None:
        """The current stream waits for them."""
        if self.pending:
            self._first_parts.wait()

    def may_block(self, sub_group: int) -> bool:
        """Whether the host could have to wait in ``publish`` of an update that is under way.

        A function of placements, order and what was asked for, on every rank the same: how far this rank's worker is,
        whether somebody here has waited for the end, or has seen a failure, and how many slots there are, play no part.
        """
        if not self._splits[sub_group].rest:
            return False
        return self._waiting_before[self._publishing[sub_group] + 1] > self._waiting_before[self._asked_for]

    def ask_for(self, sub_group: int) -> None:
        """Its parameters are about to be published, on every rank."""
        self._asked_for = max(self._asked_for, self._publishing[sub_group] + 1)

    def finish(self) -> None:
        """Returns when every action has finished."""
        if self.pending and self.failure is None:
            with self._torn_by_failure():
                self._issue(len(self._schedule.actions), blocks=True)
                for future in self._updated.values():
                    future.result()
                self._drain_streams()
                self._prefetched.clear()
        self.pending = False

    def touch(self, states: Sequence[SubGroupState]) -> None:
        """Zeros ``states``, which are updated on the CPU, on the threads that will update them."""
        for state in states:
            self._worker.submit(partial(self._host_adam.zero, state.in_slab)).result()

    def timeline(self) -> Timeline:
        """Return when each action of the last update ran, which has finished; some may have run before it began."""
        return self.timeline_reader()()

    def timeline_reader(self) -> Callable[[], Timeline]:
        """Return what gives the ``timeline`` of the update that began last, once that has finished.

        It can be read while the next update goes on, until the one after that is prefetched or begins.
        """
        return partial(self._marks.timeline, self._schedule.actions)

    def failed_within(self, timeout_s: float) -> bool:
        """Also where nobody will call ``finish``: waits so long for what the worker has begun."""
        done, _ = wait(self._updated.values(), timeout_s)
        failures = [failure for future in done if (failure := future.exception()) is not None]
        if self.failure is None and failures:
            self.fail(failures[0])
        return self.failure is not None

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
        self.pending = False
        self._updated = {}

    def close(self) -> None:
        """End the worker and give the slots back; the executor is of no use after that."""
        self._worker.close()
        self._actions.close()
        self._states = ()

    def _lanes_wait_for_caller(self) -> None:
        """To whose stream new slots belong: its kernels may still use what the memory was before."""
        self._device.current_stream().record(self._reserved)
        for stream in self._streams.values():
            stream.wait(self._reserved)

    def _wait_for_caller(self) -> None:
        """The host waits for the caller's stream, so that nothing it issues later can start before that is done.

        Backward's kernels may still read the 16-bit parameters, and write gradients to host memory that the worker
        reads. DeepSpeed has joined its reduction stream to the caller's by then. The two clocks share an origin here.
        """
        self._device.current_stream().record(self._marks.origin)
        self._marks.origin.synchronize()
        self._marks.origin_s = time.perf_counter()

    def _issue(self, until: int, *, blocks: bool) -> None:
        """The actions before position ``until``; where one waits for the worker, ``blocks`` or goes no further."""
        while self._issued < until and not self._stop.is_set():
            action = self._schedule.actions[self._issued]
            for name in action.waits:
                future = self._updated.get(name)
                if future is None:
                    continue
                if not blocks and not future.done():
                    return
                future.result()
            if self._stop.is_set():
                return  # what was waited for did not run
            if action.lane is Lane.CPU:
                self._updated[action.name] = self._worker.submit(partial(self._on_worker, action))
            elif action.name not in self._prefetched:
                self._on_stream(action, self._marks)
            self._issued += 1

    def _on_stream(self, action: Action, marks: Marks) -> None:
        stream = self._streams[action.lane]
        for name in action.waits:
            # The host has waited for those of the worker.
            if name in marks.finished:
                stream.wait(marks.finished[name])
        stream.record(marks.started[action.name])
        with stream.issue(), self._span(action.name):
            self._actions.run(action)
        stream.record(marks.finished[action.name])

    def _on_worker(self, action: Action) -> None:
        if self._stop.is_set():
            return
        try:
            for name in action.waits:
                self._marks.finished[name].synchronize()
            start_s = time.perf_counter()
            with self._span(action.name):
                self._actions.run(action)
            origin_s = self._marks.origin_s
            self._marks.on_worker[action.name] = (start_s - origin_s, time.perf_counter() - origin_s)
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

    @contextmanager
    def _torn_by_failure(self) -> Iterator[None]:
        """Keeps what is raised inside; raises only what is no ``Exception``, such as an interrupt."""
        try:
            yield
        except BaseException as error:
            self._stop.set()
            # At once: what follows waits, and may be interrupted.
            self.fail(error)
            self.fail(self._first_error(error))
            # What was issued before the failure still writes: to states that a checkpoint will be loaded into, from
            # slots that will be given back. A device that fails here, too, has its own failure told already.
            with suppress(Exception):
                self._drain_streams()
            self._prefetched.clear()
            if not isinstance(error, Exception):
                raise

    def _first_error(self, error: BaseException) -> BaseException:
        """The worker's exception, if it had one: what the host saw may only follow from it. Waits for the worker."""
        failures = [failure for future in self._updated.values() if (failure := future.exception()) is not None]
        return failures[0] if failures else error
