"""Divide the actions of many plans into parts, and compute how fast the parts run beside one another.

A copy consists of two parts: its latency, during which it shares no resource, and its work. Other actions are one part
each. So a lane always runs one part at a time, at a speed that depends on nothing but the parts that the lanes run at
the moment.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import numpy as np
import numpy.typing as npt

from perf_model.prediction.cost import CostModel, relative_speeds
from perf_model.prediction.lane_queues import (
    KIND_OF_LANE,
    LANES,
    WAITS_FOR,
    Floats,
    Integers,
    LaneQueues,
)
from perf_model.schedule.action import ActionKind

Bytes = npt.NDArray[np.uint8]

FORWARD_WAITS_FOR = slice(0, 2)
"""The lanes that update parameters on the accelerator or publish them: forward waits for their actions."""
assert {*KIND_OF_LANE[FORWARD_WAITS_FOR]} == {ActionKind.GPU_STEP, ActionKind.PUBLISH}

FLUSHES = 2
"""The lane of the flushes, the last of which empty the slots before the next backward fills them again."""
assert KIND_OF_LANE[FLUSHES] is ActionKind.FLUSH_STATES

DUE_LANES = slice(0, 3)
"""The lanes whose actions are due at some moment: those above."""

_WORK, _LATENCY = 1, 2
"""The numbers of the parts of an action; 0 is nothing."""

WEIGHTS = 3 ** np.arange(len(LANES))
"""The weights of the lanes in the number of a combination of parts, which fits in a byte."""

_COMBINATIONS = np.arange(3 ** len(LANES))[:, None] // WEIGHTS % 3
"""The numbers of the parts of all lanes in each combination."""

_LEAST_SHARE = 4e-15
"""The least duration of a part, as a share of that of all parts: rounding must not make it 0, because the product of 0
and an infinite slowness is no number."""


@lru_cache(maxsize=16)
def slowness_of_parts(cost: CostModel) -> Floats:
    """Return the slowness of the part of each lane, of shape [lane, combination of parts].

    It is the time that the part takes, as a multiple of that which it takes alone; infinite for a lane that runs
    nothing.
    """
    loads = {LANES.index(kind.lane): cost.load(kind, 1) for kind in cost.per_param}
    working = np.full((len(LANES), len(_COMBINATIONS)), np.inf)
    for numbers in product((0, _WORK), repeat=len(LANES)):
        running = {lane: loads[lane] for lane, number in enumerate(numbers) if number and lane in loads}
        speeds = relative_speeds(list(running.values()), cost.capacities)
        working[list(running), WEIGHTS @ numbers] = 1.0 / np.array(speeds)
    latency = _COMBINATIONS.T == _LATENCY
    # A lane in its latency shares nothing, so the others run as if it ran nothing.
    without = WEIGHTS @ np.where(latency, 0, _COMBINATIONS.T)
    slowness: Floats = np.where(latency, 1.0, working[:, without])
    return slowness


@dataclass(frozen=True, kw_only=True)
class LaneParts:
    """The parts of the actions of several plans, in flat arrays with one position per part.

    Each lane of a plan runs its parts in the order of their positions, beginning at ``first`` of shape [lane, plan].
    ``sizes`` are the numbers of positions of each lane, of all plans together.
    After its last part there is one that never starts. For each part, ``waits`` is the position that the lane in
    ``WAITS_FOR`` must have reached before the part starts, and ``weights`` is the number of the part times the weight
    of the lane. ``ends_s`` are the seconds of the part and of those before it on its lane, if nothing else runs;
    infinite for a part that never starts. ``due_s`` is the moment from which the part would delay forward or the next
    backward; infinite if nothing waits for the part.
    """

    first: Integers
    sizes: Integers
    waits: Integers
    weights: Bytes
    ends_s: Floats
    due_s: Floats

    @classmethod
    def divide(cls, queues: LaneQueues, seconds: Floats, needed_s: Floats, refilled_s: Floats) -> LaneParts:
        """Return the parts of the actions of ``queues``.

        ``seconds`` has the shape [2, lane, unit]: of the latency and of the work. ``needed_s`` is by unit, the moment
        at which forward needs its parameters. ``refilled_s`` is by plan and slot, the moment at which the next backward
        prefetches into the slot.
        """
        latency_s, work_s = seconds
        least_s = _LEAST_SHARE * float(seconds.sum())
        count = queues.lengths.shape[1]
        per_action: Integers = 1 + latency_s.any(axis=1)
        actions: Integers = queues.lengths.max(axis=1) + 1
        sizes = count * actions * per_action
        begins = np.cumsum(sizes) - sizes
        first: Integers = begins[:, None] + np.arange(count) * (actions * per_action)[:, None]
        parts = cls(
            first=first,
            sizes=sizes,
            waits=np.empty(sizes.sum(), np.int64),
            weights=np.empty(sizes.sum(), np.uint8),
            ends_s=np.empty(sizes.sum()),
            due_s=np.full(sizes[DUE_LANES].sum(), np.inf),
        )
        for lane, weight in enumerate(WEIGHTS.tolist()):
            units, after = (array[lane, :, : actions[lane]] for array in (queues.units, queues.after))
            runs = np.arange(actions[lane]) < queues.lengths[lane][:, None]
            block = slice(begins[lane], begins[lane] + sizes[lane])
            shape = (count, actions[lane], per_action[lane])
            waits, weights, ends_s = (
                array[block].reshape(shape) for array in (parts.waits, parts.weights, parts.ends_s)
            )
            other = WAITS_FOR[lane]
            waits[...] = np.where(runs, first[other][:, None] + after * per_action[other], 0)[..., None]
            weights[..., 0] = runs * (_LATENCY * weight)
            weights[..., -1] = runs * (_WORK * weight)
            ends_s[..., 0] = latency_s[lane].take(units)
            ends_s[..., -1] = work_s[lane].take(units)
            by_plan = np.maximum(least_s, parts.ends_s[block]).reshape(count, -1)
            np.cumsum(by_plan, axis=1, out=parts.ends_s[block].reshape(count, -1))
            ends_s[~runs] = np.inf
            if lane in range(len(LANES))[FORWARD_WAITS_FOR]:
                parts.due_s[block].reshape(shape)[..., -1] = np.where(runs, needed_s.take(units), np.inf)
            elif lane == FLUSHES:
                # The slots are filled in the order in which the last flushes empty them.
                slot = np.arange(actions[lane]) - (queues.lengths[lane] - queues.slots)[:, None]
                last = runs & (slot >= 0)
                due_s = np.take_along_axis(refilled_s, np.where(last, slot, 0), axis=1)
                parts.due_s[block].reshape(shape)[..., -1] = np.where(last, due_s, np.inf)
        return parts

    def ended(self, lane: int, passed_s: Floats) -> Integers:
        """Return, for each plan, the number of parts of ``lane`` that have ended after ``passed_s`` seconds.

        The lane runs alone and without waiting. ``passed_s`` has the shape [plan].
        """
        begin, size = int(self.first[lane, 0]), int(self.sizes[lane])
        ends_s = self.ends_s[begin : begin + size].reshape(len(passed_s), -1)
        ended: Integers = np.count_nonzero(ends_s <= (1.0 + 1e-12) * passed_s[:, None], axis=1)
        return ended
