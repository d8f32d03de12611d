"""Simulate many plans of one workload at once: the event loop of ``simulate.py`` with one column per plan.

A search compares thousands of plans. Together they advance in arrays, each to the next event of its own, which takes a
twentieth of the time that the plans take one by one. The rules and the results are those of ``Simulator``; a host that
executes actions itself (``CostModel.blocks``) is not simulated here.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count as count_from
from itertools import product

import numpy as np

from perf_model.prediction.cost import CostModel, relative_speeds
from perf_model.prediction.lane_queues import KINDS_OF_LANES, LANES, WAITS_FOR, Floats, Integers, LaneQueues
from perf_model.prediction.overlap_windows import ALLOWED_IN_BACKWARD, Windows
from perf_model.schedule.action import ActionKind, Lane
from perf_model.schedule.workload import Workload

_H2D, _CPU = LANES.index(Lane.H2D), LANES.index(Lane.CPU)

_MAKE_READY = (ActionKind.GPU_STEP, ActionKind.PUBLISH)
"""The kinds of action after which forward can use the parameters of the unit."""


@dataclass(frozen=True, kw_only=True)
class ManyTimes:
    """The exposed seconds of each plan, and the seconds in which at least one of its actions ran.

    Both are infinite for a plan whose simulation was stopped.
    """

    exposed_s: Floats
    active_s: Floats


class ManySimulator:
    """A simulator of plans of one workload that differ in their placements and their numbers of slots.

    ``simulated`` counts the plans that were simulated.
    """

    def __init__(self, workload: Workload, cost: CostModel, windows: Windows) -> None:
        assert not cost.blocks
        assert windows.first_use is None, "the workload is arranged"
        self.simulated = 0
        self._windows = windows
        self._numels = np.array([unit.numel for unit in workload.units], dtype=np.float64)
        self._needed_s = windows.forward_s * (np.cumsum(self._numels) - self._numels) / self._numels.sum()
        loads = {kind: cost.load(kind, 1) for kind in cost.per_param}
        per_kind = [[loads.get(kind) if kind else None for kind in kinds] for kinds in KINDS_OF_LANES]
        self._alone_s, self._latency_s = np.zeros((len(LANES), 3)), np.zeros((len(LANES), 3))
        for lane, of_lane in enumerate(per_kind):
            for number, load in enumerate(of_lane):
                if load is not None:
                    self._alone_s[lane, number], self._latency_s[lane, number] = load.alone_s, load.latency_s
        # Column c has the speed of each lane while the kinds run that c stands for: see ``_WEIGHTS``.
        columns = []
        for moving in product(*per_kind):
            running = {lane: load for lane, load in enumerate(moving) if load is not None}
            speeds = relative_speeds(list(running.values()), cost.capacities)
            columns.append([dict(zip(running, speeds, strict=True)).get(lane, 1.0) for lane in range(len(LANES))])
        self._speeds = np.array(columns).T.copy()

    def run(self, codes: Integers, slots: Integers, enough_s: float = np.inf) -> ManyTimes:
        """Simulate the plans with placements ``codes`` of shape [plan, unit] and at most ``slots`` slots each.

        The simulation of a plan stops as soon as its exposed time is known to reach ``enough_s``.
        """
        self.simulated += len(codes)
        queues = LaneQueues.lower(self._numels, codes, slots)
        lanes = np.arange(len(LANES))[:, None, None]
        numels = np.where(queues.kinds > 0, self._numels[queues.units], 0.0)
        alone_s = self._alone_s[lanes, queues.kinds] * numels
        latency_s = self._latency_s[lanes, queues.kinds]
        needed_s = np.where(_READY[lanes, queues.kinds], self._needed_s[queues.units], np.inf)
        prefetch = KINDS_OF_LANES[_H2D].index(ALLOWED_IN_BACKWARD)
        fills = np.arange(queues.kinds.shape[2]) < queues.slots[:, None]
        fill_s = ((alone_s[_H2D] + self._latency_s[_H2D, prefetch]) * fills).sum(axis=1)
        now_s = 0.0 - np.minimum(self._windows.backward_s, fill_s)
        return self._advance(queues, alone_s, latency_s, needed_s, now_s, enough_s)

    def _advance(
        self, queues: LaneQueues, alone_s: Floats, latency_s: Floats, needed_s: Floats, now_s: Floats, enough_s: float
    ) -> ManyTimes:
        """Advance each plan from event to event until its last action has ended, and return the times."""
        count, width = queues.kinds.shape[1:]
        times = ManyTimes(exposed_s=np.full(count, np.inf), active_s=np.full(count, np.inf))
        plans, start_s = np.arange(count), now_s
        first = (np.arange(len(LANES))[:, None] * count + plans) * width
        after_cpu = np.where(queues.kinds > 0, queues.after_cpu, _NEVER).ravel()
        after_other = queues.after_other.ravel()
        weights = (queues.kinds * _WEIGHTS[:, None, None]).ravel()
        alone_s, latency_s, needed_s = alone_s.ravel(), latency_s.ravel(), needed_s.ravel()
        # Positions of the next or the running action of each lane in the flat arrays.
        position = first.copy()
        running = np.zeros(position.shape, dtype=bool)
        left_s, moves_at_s, late_s = (np.zeros(position.shape) for _ in range(3))
        in_backward = bool((now_s < 0.0).any())
        for step in count_from(1):
            ended = position - first
            waited = ended.take(WAITS_FOR, axis=0)
            starts = (ended[_CPU] >= after_cpu.take(position)) & (waited >= after_other.take(position)) & ~running
            weight = weights.take(position)
            if in_backward:
                starts &= (now_s >= 0.0) | (weight == _PREFETCHES[:, None])
            left_s = np.where(starts, alone_s.take(position), left_s)
            moves_at_s = np.where(starts, now_s + latency_s.take(position), moves_at_s)
            running |= starts
            moving = running & (moves_at_s <= now_s)
            speed = self._speeds.take((weight * moving).sum(axis=0), axis=1)
            ends_s = np.where(moving, now_s + left_s / speed, np.where(running, moves_at_s, np.inf))
            then_s = ends_s.min(axis=0)
            if in_backward:
                then_s = np.where(now_s < 0.0, np.minimum(then_s, 0.0), then_s)
            going = then_s < np.inf
            then_s = np.where(going, then_s, now_s)
            passed_s = then_s - now_s
            left_s = left_s - np.where(moving, speed * passed_s, 0.0)
            # As in ``Simulator``: rounding may leave a little of the action that ends first.
            ends = moving & (ends_s <= then_s + 1e-9 * passed_s)
            late_s = np.maximum(late_s, np.where(ends, then_s - needed_s.take(position), 0.0))
            running &= ~ends
            position = position + ends
            now_s = then_s
            in_backward = in_backward and bool((now_s < 0.0).any())
            if step % _STEPS_UNCHECKED:
                continue
            exposed_s = np.maximum(late_s.max(axis=0), now_s - self._windows.forward_s)
            finished = ~going & (exposed_s < enough_s)
            times.exposed_s[plans[finished]] = exposed_s[finished]
            times.active_s[plans[finished]] = (now_s - start_s)[finished]
            going &= exposed_s < enough_s
            number = np.count_nonzero(going)
            if number == 0:
                return times
            # Dropping columns copies all arrays, so it waits until half of the plans have ended.
            if 2 * number <= len(plans):
                plans, start_s, now_s = plans[going], start_s[going], now_s[going]
                first, position, running = first[:, going], position[:, going], running[:, going]
                left_s, moves_at_s, late_s = left_s[:, going], moves_at_s[:, going], late_s[:, going]
        raise AssertionError("the loop returns")


_WEIGHTS = np.array([8, 4, 2, 1])
"""The weights of the lanes in the number of a combination of kinds: h2d has three kinds, the other lanes have two."""

_PREFETCHES = np.array([8 if lane is ALLOWED_IN_BACKWARD.lane else -1 for lane in LANES])
"""The weighted kind of a prefetch, by lane; -1 is no kind."""

_NEVER = 2**31
"""More actions than any lane runs."""

_STEPS_UNCHECKED = 8
"""The number of events after which the loop looks for plans that have ended."""

_READY = np.array([[kind in _MAKE_READY for kind in (*kinds, None)[:3]] for kinds in KINDS_OF_LANES])
"""Whether forward waits for an action, by lane and number of the kind."""
