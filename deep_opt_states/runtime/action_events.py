"""Hold the events around the actions of one update."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import Any

from deep_opt_states.device.interface import Device, Event
from perf_model.prediction.timeline import Span, Timeline
from perf_model.schedule.action import Action, Lane


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
        """Return when each of ``actions`` ran, after the end of the update. The host waits for flushes in flight.

        A write to disk that has failed, which the next update reports, is left out.
        """
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
