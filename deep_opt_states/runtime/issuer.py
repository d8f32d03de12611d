"""Issue the actions of an update on the streams of their lanes, and on the worker.

Streams wait for one another by events, and the host continues. A stream cannot wait for a thread, so the worker itself
issues the PUBLISH of a unit as soon as its CPU_STEP has ended. No other action on a stream waits for the CPU. The
threads that read and write units on disk wait for anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from itertools import takewhile
from typing import Any

from deep_opt_states.device.interface import Device, Event
from deep_opt_states.runtime.early_units import EarlyUnits
from deep_opt_states.runtime.failure import Stop
from deep_opt_states.runtime.lanes import ActionEvents, LaneStreams
from deep_opt_states.runtime.worker import HostThreads
from perf_model.schedule.action import Action, ActionKind, Lane
from perf_model.schedule.happens_before import EMPTIED_BY
from perf_model.schedule.schedule import Schedule
from perf_model.schedule.slots import flushes_before, in_vain, slot_shift


class Issuer:
    """The issue of the actions of a schedule, which ``run`` executes by kind, on the current stream or the worker."""

    def __init__(
        self,
        device: Device[Any],
        lanes: LaneStreams,
        threads: HostThreads,
        run: Mapping[ActionKind, Callable[[Action], None]],
        span: Callable[[str], AbstractContextManager[object]],
    ) -> None:
        self._device = device
        self._lanes = lanes
        self._threads = threads
        self._run = run
        self._span = span
        self.stop = Stop()
        self.on_cpu: dict[str, Future[None]] = {}
        """The futures of the tasks of the worker and of other threads in this update, by the action's name."""
        self.issued = 0
        self._ended_on_cpu = 0
        """The position up to which the worker is known to have run or issued its actions."""
        self._prefetched: set[str] = set()
        """The names of actions that were issued, or below submitted, for the next update."""
        self._early_reads: dict[str, Future[None]] = {}
        self._speculated: dict[Action, Future[None]] = {}
        self._discarded = False  # whether steps of streamed units were discarded since the last update
        self._early = EarlyUnits(lanes.streams[Lane.COMPUTE], self._issue_early)
        self._carried: dict[str, Event] = {}
        """The d2h stream -> h2d stream: flushes in flight, by the name of the prefetch that waits."""

    def set_schedule(self, schedule: Schedule) -> None:
        """Issue ``schedule`` from the next update on, and reserve its events. No update is in flight."""
        self.forget_prefetches()
        self.schedule = self._planned = schedule
        self._in_vain = in_vain(schedule)
        self._thread_of = {action.name: self._threads[action.lane] for action in schedule.actions}
        on_streams = [action.name for action in schedule.actions if not action.lane.is_thread]
        # Two sets: the timeline of one update can be read while the next update records the other set.
        self.events, self._next_events = (ActionEvents(self._device, on_streams) for _ in range(2))
        of_worker = takewhile(lambda action: action.lane.is_thread or action.lane is Lane.PUBLISH, schedule.actions)
        self.first_of_caller = len(list(of_worker))
        """The number of actions of the worker before the first action that the caller issues."""
        self._first_fills = [action for action in schedule.actions if action.kind in EMPTIED_BY and not action.waits]
        writes = [action.name for action in schedule.actions if action.kind is ActionKind.WRITE]
        self._speculations = {action.unit: action for action in schedule.actions if action.kind is ActionKind.SPECULATE}
        self._early.set_schedule(schedule)
        before = flushes_before(schedule)
        self.flushes_before = {name: flush for name, flush in before.items() if flush not in writes}
        """The flush of the previous update that a prefetch waits for, by the name of the prefetch."""
        self._waits_for_writes = {name: 1 + writes.index(write) for name, write in before.items() if write in writes}
        self.slot_shift = slot_shift(schedule)

    def begin(self) -> None:
        """Start an update, with the prefetches that were issued for it."""
        self.on_cpu, self._early_reads = self._early_reads, {}
        self.issued = self._ended_on_cpu = 0
        # The other set then has the writes to disk of the update before.
        self.events, self._next_events = self._next_events, self.events
        self.events.writes = []
        self.schedule = self._planned

    def prefetch(self) -> None:
        """Issue the first prefetch into each slot, and the first read into each disk slot, for the next update."""
        # After a step in vain, the next one may be in vain also, with other slots.
        for action in self._first_fills if self.schedule is self._planned else ():
            if not action.lane.is_thread:
                self._issue_early(action)
            elif action.name not in self._early_reads:
                self._early_reads[action.name] = self._submit(action, self._next_events, self.events.writes)

    def speculate(self, unit: int, ready: Event | None, reduced: Event) -> None:
        """Run the step of ``unit`` in the next update ahead: the worker after ``ready``, a stream after ``reduced``."""
        if unit not in self._speculations:
            self._early.speculate(unit, reduced)
            return
        action = self._speculations[unit]
        if action in self._speculated:
            # Even if it runs already, its repetition follows.
            self._speculated[action].cancel()
        run = partial(self._run_on_worker, action, self._next_events, ready)
        self._speculated[action] = self._threads[Lane.CPU].submit(run)

    def keep_speculations(self, is_valid: Callable[[int], bool]) -> bool | None:
        """Keep the speculated steps of valid units for the update, and return whether all were, None without any."""
        # A step that runs in vain ends before its repetition on the same thread.
        valid = [is_valid(action.unit) for action in self._speculated]
        for (action, future), holds in zip(self._speculated.items(), valid, strict=True):
            if not future.cancel() and holds:
                self.on_cpu[action.name] = future
        self._speculated.clear()
        streamed = [is_valid(unit) for unit in self._early.speculated]
        if not all(streamed):
            self._discard_early()
        if self.schedule.adopts and not (streamed and all(streamed)):
            self._run_in_vain()
        self._early.restart()
        valid += [*streamed, *([False] if self._discarded else [])]
        self._discarded = False
        return all(valid) if valid else None

    def forget_speculations(self, units: Collection[int] | None = None) -> None:
        """Discard the speculated steps of ``units``, by default of all, and block the host while one of them runs."""
        for action in [action for action in self._speculated if units is None or action.unit in units]:
            future = self._speculated.pop(action)
            if not future.cancel():
                # An error is not one of an update: its step runs again.
                future.exception()
        if units is None or not self._early.speculated.isdisjoint(units):
            self._discard_early()
        else:
            self._early.leave_out(units)

    def _issue_early(self, action: Action) -> None:
        if action.name not in self._prefetched:
            self._on_stream(action, self._next_events)
            self._prefetched.add(action.name)

    def _discard_early(self) -> None:
        """Discard the early actions, so that the update issues all of them. The host waits."""
        is_speculated = bool(self._early.speculated)
        self._early.restart()
        if is_speculated:
            self._prefetched -= self._early.names
            self._discarded = True
            # Slots and the other versions of the states are in use until then.
            self._lanes.drain()

    def _run_in_vain(self) -> None:
        """Execute the schedule of a step before which no streamed unit was updated, with other slots for units."""
        self.schedule = self._in_vain
        # Flushes run in order, so the last one is enough.
        for flushed in [*self._carried.values()][-1:]:
            self._lanes.streams[Lane.H2D].wait(flushed)
        self._carried.clear()
        self._prefetched.clear()

    def forget_prefetches(self) -> None:
        """Issue the first prefetches and reads again, for an update that has not started."""
        self._prefetched.clear()
        self._early_reads.clear()

    def carry_flushes(self) -> None:
        """Let the prefetches of the next update wait for the flushes of this one, which are in flight."""
        # After a step in vain, the last ADOPT on the same stream has waited for all of them.
        before = self.flushes_before if self.schedule is self._planned else {}
        self._carried = {prefetch: self.events.finished[flush] for prefetch, flush in before.items()}

    def forget_flushes(self) -> None:
        """Let no prefetch or read wait for the last update: the host has waited for its flushes and writes."""
        self._carried.clear()
        self.events.writes = []
        self._next_events.writes = []

    def issue(self, until: int) -> None:
        """Issue the actions before position ``until``. The host does not wait."""
        while self.issued < until and not self.stop.is_set():
            action = self.schedule.actions[self.issued]
            was_early = action.name in self.on_cpu
            if not was_early and (action.lane.is_thread or not self.on_cpu.keys().isdisjoint(action.waits)):
                self.on_cpu[action.name] = self._submit(action, self.events, self._next_events.writes)
                if action.kind is ActionKind.WRITE:
                    self.events.writes.append(self.on_cpu[action.name])
            elif not was_early and action.name not in self._prefetched:
                self._on_stream(action, self.events)
            self.issued += 1

    def _submit(self, action: Action, events: ActionEvents, writes_before: Sequence[Future[None]]) -> Future[None]:
        """Let a thread run or issue ``action``; a read waits for the first ``writes_before``, of the last update."""
        thread, after = self._thread_of[action.name], writes_before[: self._waits_for_writes.get(action.name, 0)]
        # The earlier actions of the same thread have ended by then.
        others = (name for name in action.waits if self._thread_of[name] is not thread and name in self.on_cpu)
        after = [*after, *(self.on_cpu[name] for name in others)]
        return thread.submit(partial(self.on_thread, action, events, after))

    @property
    def has_issued_all(self) -> bool:
        return self.issued == len(self.schedule.actions)

    def issue_all(self) -> None:
        self.issue(len(self.schedule.actions))

    def finish(self) -> None:
        """Issue the remaining actions, and block the host until all threads but the writing one have done theirs."""
        self.issue_all()
        writes = set(self.events.writes)
        for name, future in self.on_cpu.items():
            if future not in writes:
                self.wait_for_worker(name)
        self.stop.raise_cause()
        self._ended_on_cpu = self.issued

    def finish_writes(self) -> None:
        """Block the host until the last update has written its units on disk."""
        for write in self.events.writes:
            write.result()

    def is_brought_out(self, position: int) -> bool:
        """Return whether the action at ``position`` is issued, so that a stream can wait for it."""
        ended_on_cpu = self.schedule.actions[position].lane is not Lane.PUBLISH or position < self._ended_on_cpu
        return position < self.issued and ended_on_cpu

    def has_finished(self, position: int) -> bool:
        """Return whether the action at ``position``, which is not on the CPU lane, has finished, as far as is known."""
        return self.is_brought_out(position) and self.finished_at(position).finished()

    def finished_at(self, position: int) -> Event:
        return self.events.finished[self.schedule.actions[position].name]

    def bring_out(self, position: int) -> None:
        """Issue the actions up to ``position``, and block the host until that action is issued."""
        self.issue(position + 1)
        action = self.schedule.actions[position]
        # Raise a failure of the CPU update here, not only at the end.
        for name in (*action.waits, action.name):
            self.wait_for_worker(name)
        self.stop.raise_cause()
        if action.lane is Lane.PUBLISH:
            self._ended_on_cpu = max(self._ended_on_cpu, position + 1)

    def wait_for_worker(self, name: str) -> None:
        """Block the host until the worker has run or issued the action ``name``, if it is one of the worker's."""
        if name in self.on_cpu:
            self.on_cpu[name].result()

    def first_error(self, error: BaseException) -> BaseException:
        """Wait for the threads, and return their exception, from which ``error`` may follow, or else ``error``."""
        self._threads.drain()
        failures = [failure for future in self.on_cpu.values() if (failure := future.exception()) is not None]
        return self.stop.cause or (failures[0] if failures else error)

    def on_thread(self, action: Action, events: ActionEvents, after: Sequence[Future[None]]) -> None:
        """Run or issue ``action`` on the calling thread after ``after``, whose failures it raises."""
        try:
            for future in after:
                future.result()
            if self._was_stopped(action):
                return
            if not action.lane.is_thread:
                self._on_stream(action, events)
                return
            if action.kind is ActionKind.COMMIT:
                # A failure in backward has stopped nothing.
                self.wait_for_worker(f"{ActionKind.SPECULATE.value} {action.unit}")
            for name in action.waits:
                if name in events.finished:
                    events.finished[name].synchronize()
            # Another thread may have failed meanwhile, and those that this one waited for have done nothing.
            if not self._was_stopped(action):
                self._run_on_worker(action, events)
        except BaseException as error:
            # A read for the next update may be forgotten. If it is not, its unit's step fails because of it.
            if action.kind is not ActionKind.READ or events is self.events:
                self.stop.set(error)
            raise

    def _was_stopped(self, action: Action) -> bool:
        """Return whether the update has failed. Raise if ``action`` uses a disk: others rely on the bytes."""
        if self.stop.is_set() and action.lane is not Lane.CPU and action.lane.is_thread:
            raise RuntimeError(f"{action.name} did not run, because another part of the update had failed")
        return self.stop.is_set()

    def _run_on_worker(self, action: Action, events: ActionEvents, ready: Event | None = None) -> None:
        if ready is not None:
            ready.synchronize()
        start_s = time.perf_counter()
        with self._span(action.name):
            self._run[action.kind](action)
        events.on_worker[action.name] = (start_s, time.perf_counter())

    def _on_stream(self, action: Action, events: ActionEvents) -> None:
        stream = self._lanes.streams[action.lane]
        if action.name in self._carried:
            stream.wait(self._carried.pop(action.name))
        for name in action.waits:
            # CPU steps record no event: the worker runs them before it issues the actions that wait for them.
            if name in events.finished:
                stream.wait(events.finished[name])
        stream.record(events.started[action.name])
        with stream.issue(), self._span(action.name):
            self._run[action.kind](action)
        stream.record(events.finished[action.name])
