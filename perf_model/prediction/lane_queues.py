"""Lower many plans of one workload at once to arrays: for each lane the actions that it runs, in order.

This is ``schedule/lowering.py`` for plans in forward's order, with one row per plan. It returns no actions and no
names, because a search that compares thousands of plans needs only what the simulation reads. In forward's order, every
wait is a number of actions that another lane has ended:

- A prefetch waits until the previous occupant of the slot is flushed.
- The update of a streamed unit waits for the prefetch, and the flush waits for the update.
- The host blocks before it issues a publish until the CPU has updated the unit. So an action that is issued after
  a publish waits for as many updates of the CPU as there are publishes before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from perf_model.schedule.action import ActionKind, Lane
from perf_model.schedule.placement import Placement

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
ShortIntegers = npt.NDArray[np.int32]
Booleans = npt.NDArray[np.bool_]

CODES = {placement: code for code, placement in enumerate(Placement)}
"""The integers that stand for the placements in arrays."""

LANES = (Lane.H2D, Lane.COMPUTE, Lane.D2H, Lane.CPU)
"""The lanes in the order of the first axis of all arrays."""

KINDS_OF_LANES: tuple[tuple[ActionKind | None, ...], ...] = tuple(
    (None, *(kind for kind in ActionKind if kind.lane is lane)) for lane in LANES
)
"""The kinds that a number in ``LaneQueues.kinds`` stands for, by lane; 0 stands for no action."""

WAITS_FOR = np.array([LANES.index(lane) for lane in (Lane.D2H, Lane.H2D, Lane.COMPUTE, Lane.CPU)])
"""The lane whose actions each lane waits for, besides those of the CPU."""


def encode(plans: Sequence[Sequence[Placement]]) -> Integers:
    """Return the codes of the placements of several plans, of shape [plan, unit]."""
    return np.array([[CODES[placement] for placement in placements] for placements in plans])


@dataclass(frozen=True, kw_only=True)
class LaneQueues:
    """The actions of each lane, as arrays of shape [lane, plan, position].

    ``kinds`` are indices of ``KINDS_OF_LANES``, 0 after the last action of a lane, and ``units`` are indices of
    the workload. An action starts only after the CPU has ended ``after_cpu`` actions and the lane in ``WAITS_FOR`` has
    ended ``after_other``. ``slots`` are the numbers of slots that the plans use.
    """

    kinds: ShortIntegers
    units: ShortIntegers
    after_cpu: ShortIntegers
    after_other: ShortIntegers
    slots: Integers

    @classmethod
    def lower(cls, numels: Floats, codes: Integers, slots: Integers) -> LaneQueues:
        """Lower the plans with placements ``codes`` of shape [plan, unit] and at most ``slots`` slots each."""
        count, length = codes.shape
        on_cpu, streamed, resident = (codes == CODES[placement] for placement in Placement)
        order = _forward_order(numels, on_cpu, streamed, resident)
        on_cpu, streamed, resident = (np.take_along_axis(mask, order, 1) for mask in (on_cpu, streamed, resident))
        published, rank = np.cumsum(on_cpu, axis=1), np.cumsum(streamed, axis=1) - 1
        slots = np.minimum(slots, rank[:, -1] + 1)
        # A prefetch is issued right after the flush that frees its slot.
        refills = streamed & (rank + slots[:, None] < rank[:, -1:] + 1)
        position = slots[:, None] + np.cumsum(on_cpu | refills, axis=1) - 1
        prefetch_position = np.tile(np.arange(length), (count, 1))
        plan, item = np.nonzero(refills)
        prefetch_position[plan, rank[plan, item] + slots[plan]] = position[plan, item]

        shape = (len(LANES), count, length + 1)
        # Arrays of 32 bits are half as long, and this takes as long as it takes to fill them.
        lowered = cls(**{name: np.zeros(shape, np.int32) for name in _ARRAYS}, slots=slots)
        after_cpu, after_other = lowered.after_cpu, lowered.after_other
        h2d, compute, d2h, _ = range(len(LANES))

        after_cpu[h2d, plan, position[plan, item]] = published[plan, item]
        after_other[h2d, plan, position[plan, item]] = rank[plan, item] + 1
        plan, item = np.nonzero(on_cpu)
        lowered._put(ActionKind.CPU_STEP, plan, published[plan, item] - 1, order[plan, item])
        lowered._put(ActionKind.PUBLISH, plan, position[plan, item], order[plan, item])
        after_cpu[h2d, plan, position[plan, item]] = published[plan, item]
        plan, item = np.nonzero(resident)
        lowered._put(ActionKind.GPU_STEP, plan, item, order[plan, item])
        plan, item = np.nonzero(streamed)
        ranks = rank[plan, item]
        updates = resident.sum(axis=1)[plan] + ranks
        lowered._put(ActionKind.PREFETCH, plan, prefetch_position[plan, ranks], order[plan, item])
        lowered._put(ActionKind.GPU_STEP, plan, updates, order[plan, item])
        after_cpu[compute, plan, updates] = published[plan, item]
        after_other[compute, plan, updates] = prefetch_position[plan, ranks] + 1
        lowered._put(ActionKind.FLUSH_STATES, plan, ranks, order[plan, item])
        after_other[d2h, plan, ranks] = updates + 1
        return lowered

    def _put(self, kind: ActionKind, plan: Integers, position: Integers, unit: Integers) -> None:
        lane = LANES.index(kind.lane)
        self.kinds[lane, plan, position] = KINDS_OF_LANES[lane].index(kind)
        self.units[lane, plan, position] = unit


_ARRAYS = ("kinds", "units", "after_cpu", "after_other")


def _forward_order(numels: Floats, on_cpu: Booleans, streamed: Booleans, resident: Booleans) -> Integers:
    """Return the order of the units of each plan, as ``order.forward_order`` does for one plan."""
    length = len(numels)
    due = np.full((len(on_cpu), 2 * length), np.inf)
    for mask, first, counted in ((streamed, 0, 0.5), (on_cpu, length, 1.0)):
        done = np.cumsum(mask * numels, axis=1)
        share = (done - (1 - counted) * numels) / np.maximum(done[:, -1:], 1.0)
        due[:, first : first + length] = np.where(mask, share, np.inf)
    due[:, :length][resident] = -1.0
    order: Integers = np.argsort(due, axis=1, kind="stable")[:, :length] % length
    return order
