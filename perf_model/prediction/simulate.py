"""Event-driven simulation of a schedule: the very actions that the executor runs, with the costs of a ``CostModel``.

As the executor does: the host issues actions in order, and before one that waits for the cpu lane it stands still until
that is done; a lane runs its actions one at a time in issue order; an action starts when its waits are over. Speeds are
recomputed whenever an action starts or ends. With a window in backward, prefetches start before second 0, at which the
step is decided and everything else may start: in the tail of backward, no earlier than it takes to fill the slots.
"""

from __future__ import annotations

from functools import cache
from itertools import takewhile

from perf_model.prediction.cost import CostModel, Load, shares
from perf_model.prediction.overlap_windows import EARLY, Windows
from perf_model.prediction.timeline import Span, Timeline
from perf_model.schedule.action import ActionKind, Lane
from perf_model.schedule.schedule import Schedule
from perf_model.schedule.workload import Workload

NO_WINDOWS = Windows()

_NEVER_S = float("inf")


def simulate(schedule: Schedule, workload: Workload, cost: CostModel, windows: Windows = NO_WINDOWS) -> Timeline:
    """The predicted timeline of a checked schedule, seconds since the step was decided."""
    return Simulator(cost, windows).run(schedule, workload)


class Simulator:
    """Remembers what it has worked out, for many simulations with one cost model."""

    def __init__(self, cost: CostModel, windows: Windows = NO_WINDOWS) -> None:
        self.windows = windows
        self.blocks = cost.blocks
        self.load = cache(cost.load)
        self.shares = cache(lambda *kinds: shares([cost.load(kind, 1) for kind in kinds], cost.capacities))

    def run(self, schedule: Schedule, workload: Workload) -> Timeline:
        return _Simulation(schedule, workload, self).run()


class _Running:
    """An action that has started: seconds until it moves anything, then seconds alone that are left of it."""

    __slots__ = ("alone_s", "kind", "moves_at_s", "position")

    def __init__(self, position: int, kind: ActionKind, load: Load, now_s: float) -> None:
        self.position = position
        self.kind = kind
        self.moves_at_s = now_s + load.latency_s
        self.alone_s = load.alone_s


class _Simulation:
    """Actions are known by their positions in the schedule."""

    def __init__(self, schedule: Schedule, workload: Workload, simulator: Simulator) -> None:
        self._actions = schedule.actions
        self._simulator = simulator
        self._numels = {sub_group.index: sub_group.numel for sub_group in workload.sub_groups}
        self._now_s = 0.0 - min(simulator.windows.backward_s, self._early_s())
        self._issued = 0
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

    def run(self) -> Timeline:
        while True:
            self._issue()
            self._start()
            if not self._running and self._now_s >= 0.0:
                break
            self._advance()
        assert not any(self._waiting.values()), "a checked schedule does not deadlock"
        return Timeline(tuple(map(Span, self._actions, self._started_s, self._ended_s)))

    def _early_s(self) -> float:
        """Seconds of the prefetches that wait for no flush: they run one after another, and nothing beside them."""
        on_lane = (action for action in self._actions if action.lane is EARLY.lane)
        early = takewhile(lambda action: action.kind is EARLY and not action.waits, on_lane)
        return sum(self._simulator.load(EARLY, self._numels[action.sub_group]).total_s for action in early)

    def _issue(self) -> None:
        while self._issued < len(self._actions):
            if self._simulator.blocks and self._issued and self._is_blocked_by(self._issued - 1):
                return
            for producer in self._waits[self._issued]:
                if self._ended_s[producer] == _NEVER_S and self._actions[producer].lane is Lane.CPU:
                    return
            self._issued += 1

    def _is_blocked_by(self, position: int) -> bool:
        return self._ended_s[position] == _NEVER_S and self._actions[position].lane is not Lane.CPU

    def _start(self) -> None:
        for lane, waiting in self._waiting.items():
            if waiting and lane not in self._running and self._may_start(waiting[-1]):
                position = waiting.pop()
                action = self._actions[position]
                load = self._simulator.load(action.kind, self._numels[action.sub_group])
                self._running[lane] = _Running(position, action.kind, load, self._now_s)
                self._started_s[position] = self._now_s

    def _may_start(self, position: int) -> bool:
        if position >= self._issued or (self._now_s < 0.0 and self._actions[position].kind is not EARLY):
            return False
        # A generator here would cost a fifth of the simulation's time.
        for producer in self._waits[position]:  # noqa: SIM110
            if self._ended_s[producer] == _NEVER_S:
                return False
        return True

    def _advance(self) -> None:
        """To the next end of an action or of its latency, or to the moment the step is decided."""
        now_s = self._now_s
        then_s = 0.0 if now_s < 0.0 else _NEVER_S
        moving = []
        for running in self._running.values():
            if running.moves_at_s <= now_s:
                moving.append(running)
            elif running.moves_at_s < then_s:
                then_s = running.moves_at_s
        speeds = self._simulator.shares(*[running.kind for running in moving])
        ends_s = [now_s + running.alone_s / speed for running, speed in zip(moving, speeds, strict=True)]
        then_s = min(then_s, *ends_s, _NEVER_S)
        almost_s = then_s + 1e-9 * (then_s - now_s)
        for running, speed, end_s in zip(moving, speeds, ends_s, strict=True):
            running.alone_s -= speed * (then_s - now_s)
            # The first to end ends, whatever is left of it by rounding.
            if end_s <= almost_s:
                self._ended_s[running.position] = then_s
                del self._running[running.kind.lane]
        self._now_s = then_s
