"""Lower many plans of one workload at once to arrays: for each lane the actions that it runs, in order.

This is ``schedule/lowering.py`` for plans in forward's order, with one row per plan. It returns no actions and no
names, because a search that compares hundreds of plans needs only what the simulation reads. In forward's order, every
wait is a number of actions that another lane has ended:

- A prefetch waits until the previous occupant of the slot is flushed.
- The update of a streamed unit waits for the prefetch, and the flush waits for the update.
- A publish waits until the CPU has updated the unit.

Every lane runs actions of one kind.
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

LANES = (Lane.PUBLISH, Lane.COMPUTE, Lane.D2H, Lane.H2D, Lane.CPU)
"""The lanes in the order of the first axis of all arrays."""

KIND_OF_LANE = tuple(next(kind for kind in ActionKind if kind.lane is lane) for lane in LANES)
"""The kind of the actions of each lane."""

WAITS_FOR = np.array([LANES.index(lane) for lane in (Lane.CPU, Lane.H2D, Lane.COMPUTE, Lane.D2H, Lane.CPU)])
"""The lane whose actions each lane waits for. The CPU waits for nothing."""


def encode(plans: Sequence[Sequence[Placement]]) -> Integers:
    """Return the codes of the placements of several plans, of shape [plan, unit]."""
    return np.array([[CODES[placement] for placement in placements] for placements in plans])


@dataclass(frozen=True, kw_only=True)
class LaneQueues:
    """The actions of each lane, as arrays of shape [lane, plan, position].

    ``units`` are indices of the workload, valid before position ``lengths`` of shape [lane, plan]. An action starts
    only after the lane in ``WAITS_FOR`` has ended ``after`` actions. ``slots`` are the numbers of slots that the plans
    use.
    """

    units: ShortIntegers
    after: ShortIntegers
    lengths: Integers
    slots: Integers

    @classmethod
    def lower(cls, numels: Floats, codes: Integers, slots: Integers) -> LaneQueues:
        """Lower the plans with placements ``codes`` of shape [plan, unit] and at most ``slots`` slots each."""
        count, length = codes.shape
        on_cpu, streamed, resident = (codes == CODES[placement] for placement in Placement)
        order = _forward_order(numels, on_cpu, streamed, resident)
        on_cpu, streamed, resident = (np.take_along_axis(mask, order, 1) for mask in (on_cpu, streamed, resident))
        num_on_cpu, num_streamed, num_resident = (mask.sum(axis=1) for mask in (on_cpu, streamed, resident))
        slots = np.minimum(slots, num_streamed)
        num_of_kind = {
            ActionKind.CPU_STEP: num_on_cpu,
            ActionKind.PUBLISH: num_on_cpu,
            ActionKind.PREFETCH: num_streamed,
            ActionKind.GPU_STEP: num_streamed + num_resident,
            ActionKind.FLUSH_STATES: num_streamed,
        }
        lengths = np.array([num_of_kind[kind] for kind in KIND_OF_LANE])
        shape = (len(LANES), count, length + 1)
        # Arrays of 32 bits are half as long, and this takes as long as it takes to fill them.
        units, after = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        publish, compute, d2h, h2d, cpu = range(len(LANES))

        plan, item = np.nonzero(on_cpu)
        rank = (np.cumsum(on_cpu, axis=1) - 1)[plan, item]
        for lane in (cpu, publish):
            units[lane, plan, rank] = order[plan, item]
        after[publish, plan, rank] = rank + 1
        # In forward's order, resident units come first.
        plan, item = np.nonzero(resident)
        units[compute, plan, item] = order[plan, item]
        plan, item = np.nonzero(streamed)
        rank = (np.cumsum(streamed, axis=1) - 1)[plan, item]
        update = num_resident[plan] + rank
        for lane, position in ((h2d, rank), (compute, update), (d2h, rank)):
            units[lane, plan, position] = order[plan, item]
        after[h2d, plan, rank] = np.maximum(0, rank + 1 - slots[plan])
        after[compute, plan, update] = rank + 1
        after[d2h, plan, rank] = update + 1
        return cls(units=units, after=after, lengths=lengths, slots=slots)


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
