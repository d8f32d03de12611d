"""Let forward wait for the parameters of units while the update of other units still runs."""

from __future__ import annotations

from collections.abc import Iterable

from deep_opt_states.zero.step.running_plan import RunningPlan
from perf_model.schedule.action import Lane


class UnitWaits:
    """The waits of forward for the units of the update that ``running`` executes."""

    # Each wait includes the persistent unit, because any module may read its parameters.

    def __init__(self, running: RunningPlan) -> None:
        self._running = running
        self._executor = running.executor
        self.start()
        self.request_all()

    def start(self) -> None:
        """Wait for the units of the next update from now on."""
        self._waited_for: set[int] = set()
        self._gathered: set[int] = set()
        self._requested = 0
        """The position in the schedule before which every rank has requested each PUBLISH."""
        self._are_over = False
        schedule = self._running.plan.schedule
        self._published_at = {
            unit: at for unit, at in schedule.publishing.items() if schedule.actions[at].lane is Lane.PUBLISH
        }

    @property
    def none_may_block(self) -> bool:
        """Return whether ``may_block`` is false for every unit until the next update; the same on every rank."""
        # The last value is the highest, because the units are in the order of their actions.
        return self._requested > next(reversed(self._published_at.values()), -1)

    @property
    def are_over(self) -> bool:
        """Return whether this rank waits for no unit any more, and no rank limits how far it gathers ahead."""
        if not self._are_over and self.none_may_block:
            self._are_over = self._executor.has_published_all
        return self._are_over

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

    def may_block(self, unit: int) -> bool:
        """Return whether gathering the unit's parameters, while the update is deferred, could make a host wait.

        This holds for a CPU unit unless every rank has requested it, or a unit that the worker updates after it. It is
        the same on every rank, so it must not depend on the progress of this rank's worker, a failure or an eviction.
        """
        return self._published_at.get(unit, -1) >= self._requested

    def publish_persistent_unit(self) -> None:
        """Make the current stream wait for the persistent parameters."""
        unit = self._running.plan.workload.persistent_unit
        if unit is not None:
            self._mark_requested(unit)
            self._executor.publish(unit)

    def request_all(self) -> None:
        """Record that every rank waits for all units."""
        self._requested = len(self._running.plan.schedule.actions)

    def _mark_requested(self, unit: int) -> None:
        """Record that every rank is about to publish the parameters of ``unit``."""
        self._requested = max(self._requested, self._published_at.get(unit, -1) + 1)
