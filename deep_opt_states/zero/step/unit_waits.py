"""Let forward wait for the parameters of units while the update of other units still runs."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager

from deep_opt_states.zero.step.running_plan import RunningPlan
from perf_model.schedule.action import Lane


class UnitWaits:
    """The waits of forward for the units of the update that ``running`` executes.

    Each wait includes the persistent unit, because any module may read its parameters.
    """

    def __init__(self, running: RunningPlan) -> None:
        self._running = running
        self._executor = running.executor
        self._waited_for: set[int] = set()
        self._gathered: set[int] = set()
        self._requested = 0
        """The position in the schedule before which every rank has requested each PUBLISH."""

    def start(self) -> None:
        """Start with the waits for a new update."""
        self._waited_for.clear()
        self._gathered.clear()
        self._requested = 0

    def wait_for(self, units: Iterable[int]) -> None:
        """Make the current stream, which computes, wait for the parameters of ``units``."""
        self.publish_persistent_unit()
        for unit in units:
            self._mark_requested(unit)
            if unit not in self._waited_for:
                with self._running.exposure.waits.direct():
                    self._executor.publish(unit)
                self._waited_for.add(unit)

    def publish(self, units: Iterable[int]) -> None:
        """Make the current stream, which gathers, wait for the parameters of ``units``."""
        self.publish_persistent_unit()
        for unit in units:
            self._mark_requested(unit)
            if not self._executor.pending or unit in self._waited_for or unit in self._gathered:
                # One of the two streams has waited for the unit already: no time is lost here.
                self._executor.publish(unit)
            else:
                with self._running.exposure.waits.on_gathering_stream():
                    self._executor.publish(unit)
                self._gathered.add(unit)

    def for_gathering_stream(self) -> AbstractContextManager[None]:
        """Return a context in which the current stream, which computes, waits for the stream that gathers."""
        return self._running.exposure.waits.for_gathering_stream()

    def may_block(self, unit: int) -> bool:
        """Return whether gathering the unit's parameters, while the update is deferred, could make a host wait.

        This holds for a CPU unit unless every rank has requested it, or a unit that the worker updates after it. It is
        the same on every rank, so it must not depend on the progress of this rank's worker, a failure or an eviction.
        """
        position, is_published = self._publishing(unit)
        return is_published and position >= self._requested

    def publish_persistent_unit(self) -> None:
        """Make the current stream wait for the persistent parameters."""
        unit = self._running.plan.workload.persistent_unit
        if unit is not None:
            self._executor.publish(unit)

    def _mark_requested(self, unit: int) -> None:
        """Record that every rank is about to publish the parameters of ``unit``."""
        position, is_published = self._publishing(unit)
        if is_published:
            self._requested = max(self._requested, position + 1)

    def _publishing(self, unit: int) -> tuple[int, bool]:
        """Return the position of the action that makes the parameters readable, and whether it is a PUBLISH."""
        schedule = self._running.plan.schedule
        position = schedule.publishing[unit]
        return position, schedule.actions[position].lane is Lane.PUBLISH
