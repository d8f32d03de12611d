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

from perf_model.prediction.cost import CostModel, relative_speeds
from perf_model.prediction.lane_queues import (
    KIND_OF_LANE,
    LANES,
    WAITS_FOR,
    Floats,
    Integers,
    LaneQueues,
    ShortIntegers,
)
from perf_model.schedule.action import ActionKind

_MAKE_READY = (ActionKind.GPU_STEP, ActionKind.PUBLISH)
"""The kinds of action after which forward can use the parameters of the unit."""

READY_LANES = slice(0, 2)
"""The lanes that run actions of these kinds."""
assert {LANES.index(kind.lane) for kind in _MAKE_READY} == set(range(len(LANES))[READY_LANES])

_WORK, _LATENCY = 1, 2
"""The numbers of the parts of an action; 0 is nothing."""

WEIGHTS = 3 ** np.arange(len(LANES))
"""The weights of the lanes in the number of a combination of parts."""

_COMBINATIONS = np.arange(3 ** len(LANES))[:, None] // WEIGHTS % 3
"""The numbers of the parts of all lanes in each combination."""

_NEVER = 2**31 - 1
"""A position after all parts."""

_LEAST_S = 1e-300
"""The seconds of a part that takes no time: a product with infinity needs a positive number."""


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
    After its last part there is one that never starts. The two rows of ``waits_and_weights`` are, for each part, the
    position that the lane in ``WAITS_FOR`` must have reached before the part starts, and the number of the part times
    the weight of the lane. ``alone_s`` are the seconds of the part if nothing else runs, and ``needed_s`` is the moment
    at which forward needs its unit; infinite if forward does not wait for it.
    """

    first: Integers
    waits_and_weights: ShortIntegers
    alone_s: Floats
    needed_s: Floats

    @classmethod
    def divide(cls, queues: LaneQueues, seconds: Floats, needed_s: Floats) -> LaneParts:
        """Return the parts of the actions of ``queues``.

        ``seconds`` has the shape [2, lane, unit]: of the latency and of the work. ``needed_s`` is by unit.
        """
        latency_s, work_s = seconds
        count = queues.lengths.shape[1]
        per_action: Integers = 1 + latency_s.any(axis=1)
        actions: Integers = queues.lengths.max(axis=1) + 1
        sizes = count * actions * per_action
        begins = np.cumsum(sizes) - sizes
        first: Integers = begins[:, None] + np.arange(count) * (actions * per_action)[:, None]
        parts = cls(
            first=first,
            waits_and_weights=np.zeros((2, sizes.sum()), np.int32),
            alone_s=np.empty(sizes.sum()),
            needed_s=np.full(sizes.sum(), np.inf),
        )
        for lane, weight in enumerate(WEIGHTS.tolist()):
            units, after = (array[lane, :, : actions[lane]] for array in (queues.units, queues.after))
            runs = np.arange(actions[lane]) < queues.lengths[lane][:, None]
            block = slice(begins[lane], begins[lane] + sizes[lane])
            shape = (count, actions[lane], per_action[lane])
            waits_and_weights = parts.waits_and_weights[:, block].reshape(2, *shape)
            alone_s, needed = parts.alone_s[block].reshape(shape), parts.needed_s[block].reshape(shape)
            other = WAITS_FOR[lane]
            position = first[other][:, None] + after * per_action[other]
            waits_and_weights[0] = np.where(runs, position, _NEVER)[..., None]
            waits_and_weights[1, ..., 0] = runs * (_LATENCY * weight)
            waits_and_weights[1, ..., -1] = runs * (_WORK * weight)
            # After the last action, the seconds do not matter, but they are not 0.
            alone_s[..., 0] = np.maximum(_LEAST_S, latency_s[lane, units])
            alone_s[..., -1] = np.maximum(_LEAST_S, work_s[lane, units])
            if KIND_OF_LANE[lane] in _MAKE_READY:
                needed[..., -1] = np.where(runs, needed_s[units], np.inf)
        return parts
