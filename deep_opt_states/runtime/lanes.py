"""Hold the lanes' streams and events, order them with the caller's stream and the host, and check what they execute."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from enum import Enum
from typing import Any

from deep_opt_states.device.interface import Device, Event, Stream
from deep_opt_states.runtime.state import UnitState
from perf_model.prediction.timeline import Span, Timeline
from perf_model.schedule.action import Action, ActionKind, Lane
from perf_model.schedule.check import ScheduleError, check, check_next_update
from perf_model.schedule.schedule import Schedule
from perf_model.schedule.slots import in_vain
from perf_model.schedule.workload import Workload


class Waiter(Enum):
    """The one that waits until all units are updated and published."""

    STREAM = "stream"
    """The current stream, without flushes. The host waits for the worker alone."""
    HOST = "host"
    """The host, also for flushes and for writes to disk."""


class ActionEvents:
    """The events around each stream action of one update, and the times of the actions that the worker runs."""

    def __init__(self, device: Device[Any], names: Sequence[str]) -> None:
        self.started: dict[str, Event] = {name: device.event() for name in names}
        """Recorded before each action; only ``timeline`` reads them."""
        self.finished: dict[str, Event] = {name: device.event() for name in names}
        """Producer -> consumer: recorded after each action, for the streams, the worker and ``publish``."""
        self.flushed = device.event()
        """The d2h stream -> host: the flushes of the update have finished. Only ``timeline`` waits for it."""
        self.origin = device.event()
        """Caller's stream -> host: the update starts, at second 0 of the timeline."""
        self.origin_s = 0.0
        """The host's clock, in seconds, when the host has waited for ``origin``."""
        self.on_worker: dict[str, tuple[float, float]] = {}
        """Start and end of each action of the worker and of other threads, on the host's clock in seconds."""
        self.writes: list[Future[None]] = []
        """The writes of the update to disk, which may be in flight when it has ended."""

    def timeline(self, actions: Sequence[Action]) -> Timeline:
        """Return when each of ``actions`` ran, after the end of the update. The host waits for flushes in flight."""
        # The next update reports a write to disk that has failed.
        wait(self.writes)
        if any(action.lane is Lane.D2H for action in actions):
            self.flushed.synchronize()
        spans = []
        for action in actions:
            if action.lane.is_thread:
                if action.name not in self.on_worker:
                    continue
                start_s, end_s = (time_s - self.origin_s for time_s in self.on_worker[action.name])
            else:
                start_s = self.started[action.name].seconds_after(self.origin)
                end_s = self.finished[action.name].seconds_after(self.origin)
            spans.append(Span(action, start_s, end_s))
        return Timeline(tuple(spans))


class LaneStreams:
    """The streams of all lanes that are no threads, with the events for their start and their end.

    With one stream per lane, lanes overlap, and small publications overtake prefetches and flushes.

    - ``_reserved``: caller's stream -> h2d lane; the caller's kernels no longer use the new memory.
    - ``_drained``: each lane's stream -> host; everything that was issued on it has finished.
    """

    def __init__(self, device: Device[Any]) -> None:
        self._device = device
        self.streams: dict[Lane, Stream[Any]] = {lane: device.stream() for lane in Lane if not lane.is_thread}
        self._reserved = device.event()
        self._drained: dict[Lane, Event] = {lane: device.event() for lane in self.streams}

    def wait_for_new_memory(self) -> None:
        """Make copies to new memory wait for the caller's stream, on which the memory is allocated."""
        # The allocator may have reused memory that kernels on that stream still use. Other lanes wait for it later.
        self._device.current_stream().record(self._reserved)
        self.streams[Lane.H2D].wait(self._reserved)

    def wait_for_caller(self, events: ActionEvents) -> None:
        """Block the host until the caller's stream is done, and give the clocks of host and device a common origin.

        Until then, kernels of backward may read the parameters, and gradients may be in flight to host memory.
        DeepSpeed has joined its reduction stream to the caller's stream by then.
        """
        self._device.current_stream().record(events.origin)
        events.origin.synchronize()
        events.origin_s = time.perf_counter()

    def drain(self) -> None:
        """Block the host until nothing is in flight on any lane."""
        self._record_drained()
        self.wait_until_drained()

    def record_end(self, events: ActionEvents) -> None:
        self._record_drained()
        self.streams[Lane.D2H].record(events.flushed)

    def order_after_update(self) -> None:
        """Make the current stream wait for all updates and publications before ``record_end``, but not for flushes."""
        for lane in (Lane.COMPUTE, Lane.PUBLISH, Lane.H2D):
            self._device.current_stream().wait(self._drained[lane])

    def wait_until_drained(self) -> None:
        """Block the host until everything has finished that was in flight at ``record_end`` or in ``drain``."""
        for event in self._drained.values():
            event.synchronize()

    def _record_drained(self) -> None:
        for lane, stream in self.streams.items():
            stream.record(self._drained[lane])


def check_executable(schedule: Schedule, states: Sequence[UnitState]) -> None:
    """Raise ``ScheduleError`` if ``schedule`` is not safe for ``states`` and their placements, or cannot be executed.

    A stream can wait only for an event that was recorded before. So only publications may wait for the worker, each for
    the step or the COMMIT of its own unit, and the worker issues them. A thread can wait for anything.
    """
    units = Workload.from_numels(state.length for state in states).units
    workload = Workload(
        tuple(replace(unit, is_on_disk=state.disk is not None) for unit, state in zip(units, states, strict=True))
    )
    placements = check(schedule, workload)
    if schedule.adopts:
        other = in_vain(schedule)
        check(other, workload)
        # Its last ADOPT waits for all flushes, so that the next update need not.
        check_next_update(other, {})
    of_cpu_units = {action.name for action in schedule.actions if action.lane in (Lane.CPU, Lane.PUBLISH)}
    for action in schedule.actions:
        if action.lane.is_thread:
            continue
        before = ActionKind.COMMIT if states[action.unit].shadow else ActionKind.CPU_STEP
        expected = [f"{before.value} {action.unit}"] if action.kind is ActionKind.PUBLISH else []
        found = [name for name in action.waits if name in of_cpu_units]
        if found != expected:
            rule = f"PUBLISH waits for the {before.value} of its unit, and no other action waits for a CPU unit."
            raise ScheduleError(schedule, action, rule)
    assert placements == tuple(state.placement for state in states), placements
