"""Simulate many plans of one workload at once: the event loop of ``simulate.py`` with one column per plan.

A search compares hundreds of plans. Together they advance in arrays, each to the next event of its own, which takes a
twentieth of the time that the plans take one by one. The rules and the results are those of ``Simulator``; a host that
executes actions itself (``CostModel.blocks``) is not simulated here.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count as count_from

import numpy as np

from perf_model.prediction.cost import CostModel
from perf_model.prediction.lane_parts import READY_LANES, LaneParts, slowness_of_parts
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

    ``simulated`` counts the plans that were simulated.
    """

    def __init__(self, workload: Workload, cost: CostModel, windows: Windows) -> None:
        assert not cost.blocks
        assert windows.first_use is None, "the workload is arranged"
        self.simulated = 0
        self._windows = windows
        self._numels = np.array([unit.numel for unit in workload.units], dtype=np.float64)
        self._needed_s = windows.forward_s * (np.cumsum(self._numels) - self._numels) / self._numels.sum()
        self._slowness = slowness_of_parts(cost)
        self._seconds = np.zeros((2, len(LANES), len(workload.units)))
        for lane, kind in enumerate(KIND_OF_LANE):
            if kind in cost.per_param:
                load = cost.load(kind, 1)
                self._seconds[:, lane, :] = [[load.latency_s], [load.alone_s]]
        self._seconds[1] *= self._numels

    def run(self, codes: Integers, slots: Integers, enough_s: float = np.inf) -> ManyTimes:
        """Simulate the plans with placements ``codes`` of shape [plan, unit] and at most ``slots`` slots each.

        The simulation of a plan stops as soon as its exposed time is known to reach ``enough_s``.
        """
        self.simulated += len(codes)
        queues = LaneQueues.lower(self._numels, codes, slots)
        fills = np.arange(queues.units.shape[2]) < queues.slots[:, None]
        fill_s = (self._seconds[:, _FILLS].sum(axis=0)[queues.units[_FILLS]] * fills).sum(axis=1)
        now_s = 0.0 - np.minimum(self._windows.backward_s, fill_s)
        return self._advance(LaneParts.divide(queues, self._seconds, self._needed_s), now_s, enough_s)

    def _advance(self, parts: LaneParts, now_s: Floats, enough_s: float) -> ManyTimes:
        """Advance each plan from event to event until its last part has ended, and return the times.

        A search spends most of its time here, so each event takes as few operations on arrays as possible.
        """
        count = len(now_s)
        times = ManyTimes(exposed_s=np.full(count, np.inf), active_s=np.full(count, np.inf))
        plans, start_s = np.arange(count), now_s
        # The moment until which flushes are hidden, see ``Windows.flushing_s``.
        hidden_until_s = self._windows.forward_s + (self._windows.backward_s + start_s) * (self._windows.forward_s > 0)
        # The part that each lane runs or waits to start, and the seconds that are left of it.
        position = parts.first
        left_s = parts.alone_s.take(position)
        late_s = np.zeros(position[READY_LANES].shape)
        in_backward = bool((now_s < 0.0).any())
        for step in count_from(1):
            waits_and_weights = parts.waits_and_weights.take(position, axis=1)
            weights = waits_and_weights[1] * (position.take(WAITS_FOR, axis=0) >= waits_and_weights[0])
            if in_backward:
                weights *= (now_s >= 0.0) | _IN_BACKWARD
            slowness = self._slowness.take(np.add.reduce(weights, axis=0, dtype=np.int32), axis=1)
            lasts_s = left_s * slowness
            passed_s = np.minimum.reduce(lasts_s, axis=0)
            if in_backward:
                passed_s = np.where(now_s < 0.0, np.minimum(passed_s, -now_s), passed_s)
            going = passed_s < np.inf
            passed_s = np.where(going, passed_s, 0.0)
            now_s = now_s + passed_s
            # A part that forward waits for ends now or later, so forward is at least that late.
            late_s = np.maximum(late_s, now_s - parts.needed_s.take(position[READY_LANES]))
            # As in ``Simulator``: rounding may leave a little of the part that ends first.
            ends = lasts_s <= (1.0 + 1e-9) * passed_s
            position = position + ends
            left_s = np.where(ends, parts.alone_s.take(position), left_s - passed_s / slowness)
            in_backward = in_backward and bool((now_s < 0.0).any())
            if step % _STEPS_UNCHECKED:
                continue
            exposed_s = np.maximum(late_s.max(axis=0), now_s - hidden_until_s)
            finished = ~going & (exposed_s < enough_s)
            times.exposed_s[plans[finished]] = exposed_s[finished]
            times.active_s[plans[finished]] = (now_s - start_s)[finished]
            going &= exposed_s < enough_s
            number = np.count_nonzero(going)
            if number == 0:
                return times
            # Dropping columns copies all arrays, so it waits until a quarter of the plans have ended.
            if 4 * number <= 3 * len(plans):
                plans, start_s, now_s = plans[going], start_s[going], now_s[going]
                hidden_until_s = hidden_until_s[going]
                position, left_s, late_s = position[:, going], left_s[:, going], late_s[:, going]
        raise AssertionError("the loop returns")


_IN_BACKWARD = np.array([[kind is ALLOWED_IN_BACKWARD] for kind in KIND_OF_LANE])
"""The lanes that run in backward: all that can start on this lane then are prefetches into free slots."""

_STEPS_UNCHECKED = 8
"""The number of events after which the loop looks for plans that have ended."""
