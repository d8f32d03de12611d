"""Divide the actions of many plans into parts, and compute how fast the parts run beside one another.

A copy consists of two parts: its latency, during which it shares no resource, and its work. Other actions are one part
each. So a lane always runs one part at a time, at a speed that depends on nothing but the kinds of parts that the lanes
run at the moment.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np

from perf_model.prediction.cost import CostModel, relative_speeds
from perf_model.prediction.lane_queues import (
    KINDS_OF_LANES,
    LANES,
    WAITS_FOR,
    Floats,
    Integers,
    LaneQueues,
    ShortIntegers,
)
from perf_model.schedule.action import ActionKind, Lane

_CPU = LANES.index(Lane.CPU)

_MAKE_READY = (ActionKind.GPU_STEP, ActionKind.PUBLISH)
"""The kinds of action after which forward can use the parameters of the unit."""

READY_LANES = slice(0, 2)
"""The lanes that run actions of these kinds."""
assert {LANES.index(kind.lane) for kind in _MAKE_READY} == set(range(len(LANES))[READY_LANES])

_READY = np.array([[kind in _MAKE_READY for kind in (*kinds, None)[:3]] for kinds in KINDS_OF_LANES])
"""Whether forward waits for an action, by lane and number of the kind."""

_LATENCY = 3
"""The number of a latency, after those of the kinds of a lane; 0 is nothing."""

WEIGHTS = 4 ** np.arange(len(LANES))
"""The weights of the lanes in the number of a combination of parts."""

_COMBINATIONS = np.arange(4 ** len(LANES))[:, None] // WEIGHTS % 4
"""The numbers of the parts of all lanes in each combination."""

_NEVER = 2**31 - 1
"""A position after all parts."""

_LEAST_S = 1e-300
"""The seconds of a part that takes no time: a product with infinity needs a positive number."""


def slowness_of_parts(cost: CostModel) -> Floats:
    """Return the slowness of the part of each lane, of shape [lane, combination of parts].

    It is the time that the part takes, as a multiple of that which it takes alone; infinite for a lane that runs
    nothing.
    """
    loads = {kind: cost.load(kind, 1) for kind in cost.per_param}
    per_kind = [[loads.get(kind) if kind else None for kind in kinds] for kinds in KINDS_OF_LANES]
    working = np.full((len(LANES), len(_COMBINATIONS)), np.inf)
    for numbers in product(*(range(len(kinds)) for kinds in per_kind)):
        running = {lane: load for lane, number in enumerate(numbers) if (load := per_kind[lane][number]) is not None}
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
    After its last part there is one that never starts. The three rows of ``waits_and_weights`` are, for each part, the
    position that the CPU of the plan must have reached before the part starts, that which the lane in ``WAITS_FOR``
    must have reached, and the kind of part times the weight of the lane. ``alone_s`` are the seconds of the part if
    nothing else runs, and ``needed_s`` is the moment at which forward needs its unit; infinite if forward does not wait
    for it.
    """

    first: Integers
    waits_and_weights: ShortIntegers
    alone_s: Floats
    needed_s: Floats

    @classmethod
    def divide(cls, queues: LaneQueues, seconds: Floats, needed_s: Floats) -> LaneParts:
        """Return the parts of the actions of ``queues``.

        ``seconds`` has the shape [2, lane, kind, unit]: of the latency and of the work. ``needed_s`` is by unit.
        """
        latency_s, work_s = seconds
        count = queues.kinds.shape[1]
        per_action: Integers = 1 + latency_s.any(axis=(1, 2))
        actions: Integers = np.count_nonzero(queues.kinds, axis=2).max(axis=1) + 1
        sizes = count * actions * per_action
        begins = np.cumsum(sizes) - sizes
        first: Integers = begins[:, None] + np.arange(count) * (actions * per_action)[:, None]
        parts = cls(
            first=first,
            waits_and_weights=np.zeros((3, sizes.sum()), np.int32),
            alone_s=np.empty(sizes.sum()),
            needed_s=np.full(sizes.sum(), np.inf),
        )
        for lane, weight in enumerate(WEIGHTS.tolist()):
            kinds, units, after_cpu, after_other = (
                array[lane, :, : actions[lane]]
                for array in (queues.kinds, queues.units, queues.after_cpu, queues.after_other)
            )
            block = slice(begins[lane], begins[lane] + sizes[lane])
            shape = (count, actions[lane], per_action[lane])
            waits_and_weights = parts.waits_and_weights[:, block].reshape(3, *shape)
            alone_s, needed = parts.alone_s[block].reshape(shape), parts.needed_s[block].reshape(shape)
            runs = kinds > 0
            for row, after, other in ((0, after_cpu, _CPU), (1, after_other, WAITS_FOR[lane])):
                position = first[other][:, None] + after * per_action[other]
                waits_and_weights[row] = np.where(runs, position, _NEVER)[..., None]
            waits_and_weights[2, ..., 0] = runs * (_LATENCY * weight)
            waits_and_weights[2, ..., -1] = kinds * weight
            alone_s[..., 0] = np.maximum(_LEAST_S, latency_s[lane, kinds, units])
            alone_s[..., -1] = np.maximum(_LEAST_S, work_s[lane, kinds, units])
            needed[..., -1] = np.where(_READY[lane, kinds], needed_s[units], np.inf)
        return parts
