"""Decide when a training run adopts another plan, so that it follows the machine and nothing flaps.

There are three events, and rank 0 plans after each of them:

1. **The windows are known** after the first steps. A better plan is adopted at once.
2. **The memory changes.** If the running plan no longer fits, another one is adopted at once, whatever it gains. If
   there is more memory, a better plan is adopted at once.
3. **Rates or windows change**, by more than a noise of a few percent. A change costs a move of states, so a plan is
   adopted only if it is predicted to expose ``LEAST_GAIN`` less in two consecutive windows. The running plan is
   evaluated with the same rates. Frequent changes need more windows.

For example, with a CPU that is half as fast from step 410 on (a window is the last 50 steps, examined every 25)::

    step 425   15 of the 50 steps are slow: their median is as before
    step 450   40 of 50 are slow: planned with the new rate, 30 % less exposed time, once
    step 475   all are slow: planned again, 31 % less, twice: adopted
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from perf_model.plan_request import PlanRequest, SizedPlan
from perf_model.planner import PlannedUpdate
from perf_model.prediction.memory import Budgets
from perf_model.prediction.overlap_windows import Windows
from perf_model.replanning.decision import (
    Decision,
    describe_budgets,
    describe_moves,
    describe_rates,
    describe_windows,
    differs,
)
from perf_model.replanning.measurements import WindowMeasurement
from perf_model.replanning.rates import NEGLIGIBLE_SHARE, PROFILED, RatesFit
from perf_model.schedule.action import ActionKind
from perf_model.schedule.plan import UpdatePlan

LEAST_GAIN = 0.10
"""The least relative reduction of the exposed time for which changed rates change the plan."""

WINDOWS_RUNNING = 2
"""The number of consecutive windows in which a plan must gain that much."""

LEAST_SHARE = 0.002
"""The least reduction relative to forward and exposed time together. A shorter time is not worth a move."""

LEAST_GAIN_AT_ONCE = 0.01
"""The least relative gain for which measured windows or additional memory change the plan. They change rarely."""

QUIET_STEPS = 1000
"""Changes within this many steps count as frequent. From the second one on, each doubles the windows that are needed.
"""


class ReplanningPolicy:
    """The policy of one training run. It runs on rank 0, which sends its decisions to the other ranks.

    ``request`` is that of the plan at start, with the rates of the profile, and ``running`` is the plan that runs.
    """

    def __init__(self, request: PlanRequest, running: UpdatePlan) -> None:
        self.running = running
        self._request = request
        self._profiled = request.cost
        self._windows_known = False
        self._unit_size: int | None = None
        """The size of the units of the running plan; None if this policy has not chosen it."""
        self._rates = PROFILED
        self._adopted_with = PROFILED, request.windows
        self._expected: Mapping[ActionKind, float] = {}
        """The seconds by kind that need no planning, because they led to the present plan already."""
        self._gains_running = 0
        self._gains_since = 0
        self._changes: list[int] = []
        """The steps at which changed rates changed the plan."""

    def observe(
        self, measured: WindowMeasurement, budgets: Budgets | None = None, uses: Sequence[str] | None = None
    ) -> Decision | None:
        """Return the plan to adopt, given the medians of the last steps, all with the running plan; None to keep it.

        The first call plans with the windows and the rates of the profile, because a few steps are too few for rates.
        ``budgets`` are new ones if they change at the same time. ``uses`` is that of ``PlanRequest``, as soon as that
        is known.
        """
        if uses is not None:
            self._request = replace(self._request, uses=tuple(uses))
        if self._windows_known and budgets is None:
            return self._follow_rates(measured)
        windows = _with_seconds(self._request.windows, measured.windows)
        self._request = replace(self._request, windows=windows)
        if self._windows_known and budgets is not None:
            # The rates follow after another window.
            return self.change_budgets(measured.last_step, budgets)
        self._windows_known = True
        reason = describe_windows(windows, measured.first_step, measured.last_step)
        if budgets is not None:
            reason += f", {describe_budgets(self._request.budgets, budgets, measured.last_step)}"
            self._request = replace(self._request, budgets=budgets)
        return self._adopt_at_once(reason)

    def change_budgets(self, step: int, budgets: Budgets) -> Decision | None:
        """Return the plan to adopt, now that ``budgets`` are what a plan may take; None to keep the running plan.

        Raise ``DoesNotFit`` if the running plan exceeds them and no plan fits.
        """
        reason = describe_budgets(self._request.budgets, budgets, step)
        self._request = replace(self._request, budgets=budgets)
        return self._adopt_at_once(reason)

    def _adopt_at_once(self, reason: str) -> Decision | None:
        running, found = self._request.evaluate(self.running), self._request.plan()
        if self._request.budgets.missing(running.memory) or _is_better(found.planned, running):
            return self._adopt(found, running, reason)
        self._expected = running.timeline.seconds_by_kind()
        self._adopted_with = self._adopted_with[0], self._request.windows
        return None

    def _follow_rates(self, measured: WindowMeasurement) -> Decision | None:
        windows = _with_seconds(self._request.windows, measured.windows)
        if self._gains_running == 0 and not self._has_changed(measured.by_kind, windows):
            return None
        rates = RatesFit(self.running, self._profiled, windows, measured.by_kind, self._rates).run()
        self._rates, self._expected = rates, measured.by_kind
        self._request = replace(self._request, cost=rates.apply(self._profiled), windows=windows)
        running, found = self._request.evaluate(self.running), self._in_the_same_units().plan()
        if not self._gains_enough(found.planned, running):
            self._gains_running = 0
            return None
        self._gains_running += 1
        if self._gains_running == 1:
            self._gains_since = measured.first_step
        if self._gains_running < self._windows_needed(measured.last_step):
            return None
        self._changes.append(measured.last_step)
        old_rates, old_windows = self._adopted_with
        relative = old_rates.relative(self._profiled), rates.relative(self._profiled)
        return self._adopt(found, running, describe_rates(*relative, (old_windows, windows), self._gains_since))

    def _has_changed(self, by_kind: Mapping[ActionKind, float], windows: Windows) -> bool:
        """Return whether a duration differs by more than noise from the one that was planned with."""
        planned = self._request.windows
        least_s = NEGLIGIBLE_SHARE * sum(by_kind.values())
        return (
            any(kind_s > least_s and differs(self._expected.get(kind, 0.0), kind_s) for kind, kind_s in by_kind.items())
            or differs(planned.backward_s, windows.backward_s)
            or differs(planned.forward_s, windows.forward_s)
        )

    def _in_the_same_units(self) -> PlanRequest:
        """Return the request for units of the running plan's size: other sizes take longer to plan, and gain little."""
        return self._request if self._unit_size is None else replace(self._request, unit_sizes=(self._unit_size,))

    def _gains_enough(self, found: PlannedUpdate, running: PlannedUpdate) -> bool:
        gain_s = running.exposed_s - found.exposed_s
        computing_s = self._request.windows.forward_s + running.exposed_s
        return gain_s > max(LEAST_GAIN * running.exposed_s, LEAST_SHARE * computing_s)

    def _windows_needed(self, step: int) -> int:
        recent = sum(step - change < QUIET_STEPS for change in self._changes)
        return int(WINDOWS_RUNNING * 2 ** max(0, recent - 1))

    def _adopt(self, found: SizedPlan, running: PlannedUpdate, reason: str) -> Decision:
        decision = Decision(
            chosen=found, reason=reason, moves=describe_moves(self.running, found.plan), before_s=running.exposed_s
        )
        self.running, self._unit_size = found.plan, found.unit_size
        self._gains_running = 0
        self._adopted_with = self._rates, self._request.windows
        self._expected = found.planned.timeline.seconds_by_kind()
        return decision


def _with_seconds(windows: Windows, measured: Windows) -> Windows:
    """Return ``windows`` with the measured seconds. The order of first use stays."""
    return replace(windows, backward_s=measured.backward_s, forward_s=measured.forward_s)


def _is_better(found: PlannedUpdate, running: PlannedUpdate) -> bool:
    """Return whether ``found`` exposes less time, or as little in an update that takes less time."""
    enough = 1 - LEAST_GAIN_AT_ONCE
    shorter = found.exposed_s <= running.exposed_s and found.update_s < enough * running.update_s
    return found.exposed_s < enough * running.exposed_s or shorter
