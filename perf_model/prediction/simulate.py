"""Simulate a schedule event by event, with the costs of a ``CostModel``.

As in the executor, the host issues all actions ahead of time. An action *waits* until its waits are over and the
earlier actions of its lane have ended. Then it *runs*, at a speed that is recomputed whenever an action starts or ends.

Second 0 is the moment at which the step is decided. With a window in backward, prefetches and reads start earlier, at
most by the time that it takes to fill the slots, and eager units are updated as soon as backward has completed their
gradients: by the CPU in the order of completion, through slots in the order of the schedule. From second 0 on, every
lane follows the order of the schedule.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import takewhile

from perf_model.prediction.cost import CostModel, relative_speeds
from perf_model.prediction.overlap_windows import Windows
from perf_model.prediction.timeline import Span, Timeline
from perf_model.schedule.action import ActionKind, Lane
from perf_model.schedule.happens_before import EMPTIED_BY
from perf_model.schedule.schedule import Schedule
from perf_model.schedule.workload import Workload

NO_WINDOWS = Windows()

_NEVER_S = float("inf")

_SPECULATE = ActionKind.SPECULATE


def simulate(schedule: Schedule, workload: Workload, cost: CostModel, windows: Windows = NO_WINDOWS) -> Timeline:
    """Return the predicted timeline of a checked schedule, in seconds since the step was decided."""
    return Simulator(cost, windows).run(schedule, workload)


class Simulator:
    """A simulator that caches loads and relative speeds for many simulations."""

    def __init__(self, cost: CostModel, windows: Windows = NO_WINDOWS) -> None:
        self.windows = windows
        self.load = cache(cost.load)
        self.eager_flush = cost.eager_flush
        self.relative_speeds = cache(
            lambda *kinds: relative_speeds([cost.load(kind, 1) for kind in kinds], cost.capacities)
        )

    def run(self, schedule: Schedule, workload: Workload) -> Timeline:
        """Return the predicted timeline of a checked schedule, in seconds since the step was decided."""
        return _Simulation(schedule, workload, self).run()


@dataclass(slots=True)
class _Running:
    """An action that starts to move data at ``moves_at_s``. Running alone, it would take ``alone_s`` from then on."""

    position: int
    kind: ActionKind
    moves_at_s: float
    alone_s: float


class _Simulation:
    """One simulation, in which actions are identified by their positions in the schedule.

    ``_waiting`` contains the positions that have not started, per lane and with the next one last. ``_in_backward``
    contains the ones that may start before second 0, also in their order, from the moment in ``_allowed_s`` on.
    ``_ended_s`` is finite for ended actions.
    """

    def __init__(self, schedule: Schedule, workload: Workload, simulator: Simulator) -> None:
        self._actions = schedule.actions
        self._simulator = simulator
        self._numels = {unit.index: unit.numel for unit in workload.units}
        self._started_s = [_NEVER_S] * len(self._actions)
        self._ended_s = [_NEVER_S] * len(self._actions)
        self._running: dict[Lane, _Running] = {}
        self._waiting: dict[Lane, list[int]] = {lane: [] for lane in Lane}
        self._waits: list[list[int]] = []
        positions: dict[str, int] = {}
        for position, action in enumerate(self._actions):
            positions[action.name] = position
            self._waits.append([positions[name] for name in action.waits])
            self._waiting[action.lane].append(position)
        for waiting in self._waiting.values():
            waiting.reverse()
        self._in_backward = {Lane.CPU: list[int]()}
        self._allowed_s: dict[int, float] = {}
        for kind in EMPTIED_BY:
            waiting = self._in_backward[kind.lane] = self._waiting[kind.lane]
            allowed_s = 0.0 - min(simulator.windows.backward_s, self._fill_s(kind))
            self._allowed_s |= dict.fromkeys(waiting, allowed_s)
        speculations = {action.unit: positions[action.name] for action in self._actions if action.kind is _SPECULATE}
        self._early = schedule.adopts
        completed_s = simulator.windows.completed_s(workload) if speculations or self._early else {}
        if self._early:
            self._in_backward |= {lane: self._waiting[lane] for lane in (Lane.H2D, Lane.COMPUTE, Lane.D2H)}
            for position, action in enumerate(self._actions):
                if action.kind is ActionKind.PREFETCH:
                    self._allowed_s[position] = 0.0 - simulator.windows.backward_s
                elif action.lane in (Lane.H2D, Lane.COMPUTE, Lane.D2H):
                    is_early = action.unit in self._early and action.kind is not ActionKind.ADOPT
                    self._allowed_s[position] = completed_s[action.unit] if is_early else 0.0
        for unit, moment_s in completed_s.items():
            if unit in speculations and moment_s < 0.0:
                self._in_backward[Lane.CPU].append(speculations[unit])
                self._allowed_s[speculations[unit]] = moment_s
        self._now_s = -_NEVER_S
        self._now_s = self._next_allowed_s()

    def run(self) -> Timeline:
        while True:
            self._start()
            if not self._running and self._now_s >= 0.0:
                break
            self._advance()
        assert not any(self._waiting.values()), "a checked schedule does not deadlock"
        return Timeline(tuple(map(Span, self._actions, self._started_s, self._ended_s)))

    def _fill_s(self, kind: ActionKind) -> float:
        """Return the seconds of the prefetches or reads that wait for no slot, which run one after another."""
        filling = takewhile(lambda action: not action.waits, (each for each in self._actions if each.kind is kind))
        return sum(self._simulator.load(kind, self._numels[action.unit]).total_s for action in filling)

    def _next_allowed_s(self) -> float:
        """Return the next moment before second 0 at which a free lane is allowed to start an action, or second 0."""
        free = (waiting for lane, waiting in self._in_backward.items() if waiting and lane not in self._running)
        moments_s = (self._allowed_s[waiting[-1]] for waiting in free)
        return min((moment_s for moment_s in moments_s if moment_s > self._now_s), default=0.0)

    def _start(self) -> None:
        lanes = self._in_backward if self._now_s < 0.0 else self._waiting
        for lane, waiting in lanes.items():
            if waiting and lane not in self._running and self._may_start(waiting[-1]):
                position = waiting.pop()
                if waiting is not self._waiting[lane]:
                    self._waiting[lane].remove(position)
                action = self._actions[position]
                numel = self._numels[action.unit]
                if action.kind is ActionKind.FLUSH_STATES and action.unit in self._early:
                    numel = round(self._simulator.eager_flush * numel)
                load = self._simulator.load(action.kind, numel)
                self._running[lane] = _Running(position, action.kind, self._now_s + load.latency_s, load.alone_s)
                self._started_s[position] = self._now_s

    def _may_start(self, position: int) -> bool:
        if self._now_s < 0.0 and self._now_s < self._allowed_s[position]:
            return False
        # A generator here would cost a fifth of the simulation's time.
        for producer in self._waits[position]:  # noqa: SIM110
            if self._ended_s[producer] == _NEVER_S:
                return False
        return True

    def _advance(self) -> None:
        now_s = self._now_s
        then_s = self._next_allowed_s() if now_s < 0.0 else _NEVER_S
        moving = []
        for running in self._running.values():
            if running.moves_at_s <= now_s:
                moving.append(running)
            elif running.moves_at_s < then_s:
                then_s = running.moves_at_s
        speeds = self._simulator.relative_speeds(*[running.kind for running in moving])
        ends_s = [now_s + running.alone_s / speed for running, speed in zip(moving, speeds, strict=True)]
        then_s = min(then_s, *ends_s, _NEVER_S)
        almost_s = then_s + 1e-9 * (then_s - now_s)
        for running, speed, end_s in zip(moving, speeds, ends_s, strict=True):
            running.alone_s -= speed * (then_s - now_s)
            # The action that ends first ends now, even if rounding leaves a little of it.
            if end_s <= almost_s:
                self._ended_s[running.position] = then_s
                del self._running[running.kind.lane]
        self._now_s = then_s
