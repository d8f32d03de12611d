"""Simulate many plans of one workload at once: the event loop of ``simulate.py`` with one column per plan.

A search compares hundreds of plans. Together they advance in arrays, each to the next event of its own, which takes a
twentieth of the time that the plans take one by one. The rules and the results are those of ``Simulator``; a host that
executes actions itself (``CostModel.blocks``) is not simulated here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from perf_model.prediction.cost import CostModel
from perf_model.prediction.lane_parts import (
    DUE_LANES,
    FLUSHES,
    FORWARD_WAITS_FOR,
    WEIGHTS,
    LaneParts,
    slowness_of_parts,
)
from perf_model.prediction.lane_queues import KIND_OF_LANE, LANES, WAITS_FOR, Floats, Integers, LaneQueues
from perf_model.prediction.overlap_windows import ALLOWED_IN_BACKWARD, Windows
from perf_model.schedule.workload import Workload

_FILLS = KIND_OF_LANE.index(ALLOWED_IN_BACKWARD)
"""The lane that fills slots."""


@dataclass(frozen=True, kw_only=True)
class ManyTimes:
    """The exposed seconds of each plan, and the seconds in which at least one of its actions ran.

    Both are infinite for a plan whose simulation was stopped.
    """

    exposed_s: Floats
    active_s: Floats


class ManySimulator:
    """A simulator of plans of one workload that differ in their placements and their numbers of slots.

    ``simulated`` counts the plans that were simulated. With ``latency_is_work``, the latency of a copy counts as work
    that takes as long as the latency while all lanes work. A copy then has one part, so a simulation has fewer events
    and takes less time, but its result is only approximate.
    """

    def __init__(self, workload: Workload, cost: CostModel, windows: Windows, *, latency_is_work: bool = False) -> None:
        assert not cost.blocks
        assert windows.first_use is None, "the workload is arranged"
        self.simulated = 0
        self._windows, self._cost = windows, cost
        self._numels = np.array([unit.numel for unit in workload.units], dtype=np.float64)
        used = np.array([unit.forward_numel for unit in workload.units], dtype=np.float64)
        self._needed_s = windows.forward_s * (np.cumsum(used) - used) / used.sum()
        self._slowness = slowness_of_parts(cost)
        self._seconds = np.zeros((2, len(LANES), len(workload.units)))
        for lane, kind in enumerate(KIND_OF_LANE):
            if kind in cost.per_param:
                load = cost.load(kind, 1)
                self._seconds[:, lane, :] = [[load.latency_s], [load.alone_s]]
        self._seconds[1] *= self._numels
        if latency_is_work:
            self._seconds[1] += self._seconds[0] / self._slowness[:, [WEIGHTS.sum()]]
            self._seconds[0] = 0.0

    def run(self, codes: Integers, slots: Integers, enough_s: float = np.inf) -> ManyTimes:
        """Simulate the plans with placements ``codes`` of shape [plan, unit] and at most ``slots`` slots each.

        The simulation of a plan stops as soon as its exposed time is known to reach ``enough_s``.
        """
        self.simulated += len(codes)
        queues = LaneQueues.lower(self._numels, codes, slots)
        fills = np.arange(queues.units.shape[2]) < queues.slots[:, None]
        fill_s = (self._seconds[:, _FILLS].sum(axis=0)[queues.units[_FILLS]] * fills).sum(axis=1)
        filled_s = np.minimum(self._windows.backward_s, fill_s)
        refilled_s = self._refilled_s(queues, filled_s)
        parts = LaneParts.divide(queues, self._seconds, self._needed_s, refilled_s)
        return self._advance(parts, filled_s, enough_s)

    def _refilled_s(self, queues: LaneQueues, filled_s: Floats) -> Floats:
        """Return when the next backward prefetches into each slot, of shape [plan, position of the prefetch]."""
        if self._windows.forward_s == 0.0:
            return np.full(queues.units.shape[1:], np.inf)
        prefetch_s = self._seconds[:, _FILLS].sum(axis=0)[queues.units[_FILLS]]
        starts_s = np.cumsum(prefetch_s, axis=1) - prefetch_s - filled_s[:, None]
        refilled_s: Floats = self._windows.forward_s + self._windows.backward_s + np.minimum(0.0, starts_s)
        return refilled_s

    def _advance(self, parts: LaneParts, filled_s: Floats, enough_s: float) -> ManyTimes:
        """Advance each plan from event to event until its last part has ended, and return the times.

        ``filled_s`` are the seconds of backward in which slots are filled. Nothing else runs then, so the loop begins
        at the moment at which the step is decided. A search spends most of its time here, so each event takes as few
        operations on arrays as possible, and the operands of an operation have the same type.
        """
        count = len(filled_s)
        times = ManyTimes(exposed_s=np.full(count, np.inf), active_s=np.full(count, np.inf))
        plans = np.arange(count)
        # The part that each lane runs or waits to start, and the seconds of all its parts that have passed.
        position = parts.first.copy()
        position[_FILLS] += parts.ended(_FILLS, filled_s)
        passed_s = np.zeros(position.shape)
        passed_s[_FILLS] = filled_s
        now_s, end_s, blocked_s, late_s = np.zeros((4, count))
        while len(plans):
            positions: list[Integers] = []
            moments_s: list[Floats] = []
            for _ in range(_STEPS_UNCHECKED):
                starts = position.take(WAITS_FOR, axis=0) >= parts.waits.take(position)
                weights = parts.weights.take(position)
                weights *= starts.view(np.uint8)
                slowness = self._slowness.take(np.add.reduce(weights, axis=0, dtype=np.uint8), axis=1)
                lasts_s = parts.ends_s.take(position)
                lasts_s -= passed_s
                lasts_s *= slowness
                step_s: Floats = np.minimum(np.minimum.reduce(lasts_s), _NEVER_S)
                now_s = now_s + step_s
                positions.append(position)
                moments_s.append(now_s)
                # As in ``Simulator``: rounding may leave a little of the part that ends first.
                ends = lasts_s <= (1.0 + 1e-9) * step_s
                position = position + ends
                passed_s += step_s / slowness
            # A part that is due ends at the next moment or later, so what waits for it is at least that late.
            past_s = np.array(moments_s)
            due_s = parts.due_s.take(np.array(positions)[:, DUE_LANES])
            lanes_late_s = (past_s[:, None] - due_s).max(axis=0)
            blocked_s = np.maximum(blocked_s, lanes_late_s[FORWARD_WAITS_FOR].max(axis=0))
            late_s = np.maximum(late_s, lanes_late_s[FLUSHES])
            end_s = np.maximum(end_s, np.where(past_s < _NEVER_S, past_s, 0.0).max(axis=0))
            exposed_s = self._exposed_s(filled_s, end_s, blocked_s, late_s)
            going = (now_s < _NEVER_S) & (exposed_s < enough_s)
            ended = (now_s >= _NEVER_S) & (exposed_s < enough_s)
            times.exposed_s[plans[ended]] = exposed_s[ended]
            times.active_s[plans[ended]] = (end_s + filled_s)[ended]
            number = np.count_nonzero(going)
            # Dropping columns copies all arrays, so it waits until a quarter of the plans have ended.
            if 4 * number <= 3 * len(plans):
                plans, filled_s, now_s, end_s = plans[going], filled_s[going], now_s[going], end_s[going]
                blocked_s, late_s = blocked_s[going], late_s[going]
                position, passed_s = position[:, going], passed_s[:, going]
        return times

    def _exposed_s(self, filled_s: Floats, end_s: Floats, blocked_s: Floats, late_s: Floats) -> Floats:
        """Return the exposed seconds, as ``Windows.exposed_s`` does, of updates that have run until ``end_s``.

        ``blocked_s`` is the delay of forward, and ``late_s`` that of the prefetch whose slot is flushed last.
        """
        windows = self._windows
        if windows.forward_s == 0.0:
            return end_s
        flushed_s = np.maximum(0.0, end_s - windows.forward_s - blocked_s)
        beside_s = windows.late_beside_flushes_s(filled_s, flushed_s, self._cost)
        exposed_s: Floats = np.maximum(late_s, blocked_s + np.maximum(0.0, np.maximum(*beside_s)))
        return exposed_s


_STEPS_UNCHECKED = 16
"""The number of events after which the loop looks for plans that have ended."""

_NEVER_S = 1e100
"""The duration of an event of a plan that has ended."""
