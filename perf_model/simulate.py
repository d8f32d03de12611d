"""Event-driven simulation of a schedule: the very actions that the executor runs, with the costs of a ``CostModel``.

As the executor does: the host issues actions in order, and before one that waits for the cpu lane it stands still until
that is done; a lane runs its actions one at a time in issue order; an action starts when its waits are over. Rates are
recomputed whenever an action starts or ends.
"""

from __future__ import annotations

from collections import deque
from functools import cache

from perf_model.action import Action, Lane
from perf_model.cost import CostModel
from perf_model.schedule import Schedule
from perf_model.sharing import speeds
from perf_model.timeline import Span, Timeline
from perf_model.workload import Workload


def simulate(schedule: Schedule, workload: Workload, cost: CostModel) -> Timeline:
    """The predicted timeline of a checked schedule, seconds since the start of the update."""
    return Simulator(cost).run(schedule, workload)


class Simulator:
    """Remembers what it has worked out, for many simulations with one cost model.

    Equal actions share a load, and so the speeds of a set of them that runs together.
    """

    def __init__(self, cost: CostModel) -> None:
        self.load = cache(cost.load)
        self.speeds = cache(lambda *loads: speeds(loads, cost.capacities))

    def run(self, schedule: Schedule, workload: Workload) -> Timeline:
        return _Simulation(schedule, workload, self).run()


class _Simulation:
    def __init__(self, schedule: Schedule, workload: Workload, simulator: Simulator) -> None:
        self._actions = schedule.actions
        self._on_cpu = {action.name for action in schedule.actions if action.lane is Lane.CPU}
        numel = {sub_group.index: sub_group.numel for sub_group in workload.sub_groups}
        self._speeds = simulator.speeds
        self._loads = {action.name: simulator.load(action.kind, numel[action.sub_group]) for action in schedule.actions}
        self._now_s = 0.0
        self._to_issue = deque(schedule.actions)
        self._issued: dict[Lane, deque[Action]] = {lane: deque() for lane in Lane}
        self._running: dict[Lane, Action] = {}
        self._left: dict[str, float] = {}
        self._started_s: dict[str, float] = {}
        self._ended_s: dict[str, float] = {}

    def run(self) -> Timeline:
        while len(self._ended_s) < len(self._actions):
            self._issue()
            self._start()
            assert self._running, "a checked schedule does not deadlock"
            self._advance()
        spans = (Span(action, self._started_s[action.name], self._ended_s[action.name]) for action in self._actions)
        return Timeline(tuple(spans))

    def _issue(self) -> None:
        while self._to_issue:
            action = self._to_issue[0]
            if any(name in self._on_cpu and name not in self._ended_s for name in action.waits):
                return
            self._issued[action.lane].append(self._to_issue.popleft())

    def _start(self) -> None:
        for lane, waiting in self._issued.items():
            if waiting and lane not in self._running and all(name in self._ended_s for name in waiting[0].waits):
                action = waiting.popleft()
                self._running[lane] = action
                self._started_s[action.name] = self._now_s
                self._left[action.name] = 1.0

    def _advance(self) -> None:
        """To the next end."""
        names = [action.name for action in self._running.values()]
        rates = self._speeds(*(self._loads[name] for name in names))
        step_s = min(self._left[name] / rate for name, rate in zip(names, rates, strict=True))
        self._now_s += step_s
        for (lane, action), rate in zip(list(self._running.items()), rates, strict=True):
            self._left[action.name] -= rate * step_s
            if self._left[action.name] <= 1e-9:
                del self._running[lane]
                self._ended_s[action.name] = self._now_s
