"""Compute lower bounds: no schedule can finish before its busiest resource has done its work.

Let x be the share of the parameters that is streamed, and r the share that is resident. The CPU updates the other
parameters, the share 1 - x - r. Let ``streamed``, ``resident`` and ``cpu`` be the seconds per parameter that a
constraint (``resource_constraints.py``) assigns to each placement. Then the constraint is busy for

    T(x, r) = (x * streamed + r * resident + (1 - x - r) * cpu) * numel

seconds. An update takes at least the maximum of T over all constraints. So the best update takes at least the minimum
of this maximum over x and r.

A streamed parameter uses at least as much of each constraint as a resident one. So at the minimum, either nothing is
streamed, or as many parameters are resident as fit. Each of these two cases is a straight line in the plane of x and r.
On a line, the minimum is at an end, or at a point where two constraints have the same T.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from perf_model.prediction.cost import CostModel, Resource
from perf_model.prediction.memory import cuda_bytes_of, gradients_on_accelerator, resident_bytes_of
from perf_model.prediction.overlap_windows import ALLOWED_IN_BACKWARD, Windows
from perf_model.schedule.action import ActionKind
from perf_model.schedule.happens_before import CHAINS
from perf_model.schedule.placement import Placement
from perf_model.schedule.workload import Workload
from perf_model.search.resource_constraints import KINDS, Array, ResourceConstraints


@dataclass(frozen=True, kw_only=True)
class PlacementShares:
    """The shares of the parameters that are streamed and resident; the rest is updated on the CPU."""

    streamed: float = 0.0
    resident: float = 0.0

    def share(self, placement: Placement) -> float:
        """Return the share of the parameters with ``placement``."""
        shares = {Placement.STREAMED: self.streamed, Placement.RESIDENT: self.resident}
        return shares.get(placement, 1.0 - self.streamed - self.resident)

    def interpolate(self, other: PlacementShares, weight: float) -> PlacementShares:
        """Return the point on the straight line to ``other``: these shares for weight 0, ``other`` for weight 1."""
        return PlacementShares(
            streamed=self.streamed + weight * (other.streamed - self.streamed),
            resident=self.resident + weight * (other.resident - self.resident),
        )


@dataclass(frozen=True, kw_only=True)
class ResidentCapacity:
    """Upper bounds of the shares of the parameters whose states fit in GPU memory.

    ``alone`` is the share that can be resident if nothing is streamed, ``with_a_slot`` the share next to one staging
    slot. ``prefetched`` is the share whose states can be on the accelerator when the step is decided.
    """

    alone: float = 0.0
    with_a_slot: float = 0.0
    prefetched: float = 1.0

    @classmethod
    def uniform(cls, share: float) -> ResidentCapacity:
        """Return the capacity of ``share``, with or without a slot, and no limit for prefetches."""
        return cls(alone=share, with_a_slot=share)

    @classmethod
    def from_gpu_bytes(cls, workload: Workload, gpu_bytes: int | None) -> ResidentCapacity:
        """Return the capacity of ``gpu_bytes`` of GPU memory (None: unlimited), after reserving the gradients."""
        if gpu_bytes is None:
            return cls.uniform(1.0)
        numels = (sub_group.numel for sub_group in workload.sub_groups)
        gpu_bytes -= cuda_bytes_of(gradients_on_accelerator(numels, MIN_GRADIENT_BYTES)) - MAX_SHARED_BYTES
        slot_bytes = min(resident_bytes_of(sub_group.numel) for sub_group in workload.sub_groups)
        alone = _share_that_fits(gpu_bytes, workload)
        return cls(alone=alone, with_a_slot=_share_that_fits(gpu_bytes - slot_bytes, workload), prefetched=alone)


MIN_GRADIENT_BYTES = 2
"""The least bytes per parameter that a gradient takes."""

MAX_SHARED_BYTES = 22 * 2**20
"""The most bytes of states that can be in segments that the allocator reserves for gradients: in the last segment of
each size, 2 and 20 MiB."""


def _share_that_fits(gpu_bytes: int, workload: Workload) -> float:
    """Return an upper bound of the share that fits.

    The share is at most that of the sub-groups with the fewest bytes per parameter, filled up to ``gpu_bytes``. It is
    also at most that of the N largest sub-groups, where N is the number of the smallest sub-groups that would fit.
    """
    numels = np.sort([sub_group.numel for sub_group in workload.sub_groups])
    each_bytes = np.array([resident_bytes_of(numel) for numel in numels.tolist()])
    count = int(np.searchsorted(np.cumsum(np.sort(each_bytes)), max(0, gpu_bytes), side="right"))
    densest = np.argsort(each_bytes / numels)
    taken_bytes = np.concatenate([[0], np.cumsum(each_bytes[densest])])
    most = np.interp(max(0, gpu_bytes), taken_bytes, np.concatenate([[0], np.cumsum(numels[densest])]))
    return float(min(most, numels[len(numels) - count :].sum()) / workload.numel)


@dataclass(frozen=True, kw_only=True)
class Bound:
    """A lower bound of the time of an update.

    ``shares`` reach it if nothing else slows them, and ``binding`` is the resource that is busiest then.
    """

    seconds: float
    binding: Resource
    shares: PlacementShares


NO_CAPACITY = ResidentCapacity()
"""No GPU memory for residents."""


def work_bound(numel: int, cost: CostModel, capacity: ResidentCapacity = NO_CAPACITY) -> Bound:
    """Return a lower bound of all the work of the update: exposed and hidden time together."""
    return exposed_bound(numel, cost, Windows(), capacity)


def exposed_bound(numel: int, cost: CostModel, windows: Windows, capacity: ResidentCapacity = NO_CAPACITY) -> Bound:
    """Return a lower bound of the exposed time of the update, at least 0 s.

    The bound is the maximum, over all constraints, of the busy time minus the time that backward and forward can hide.
    Forward can hide any work, but no more than its own duration. The time that backward can hide has three limits, and
    each constraint has one row per limit:

    1. It is at most the duration of backward.
    2. It is at most the time of all prefetches, because backward hides no other action.
    3. It is at most the time of the prefetches that fit on the accelerator next to the resident states.
    """
    constraints = ResourceConstraints.from_cost(cost)
    prefetch_s = constraints.seconds[:, KINDS.index(ALLOWED_IN_BACKWARD)]
    per_param = {}
    for placement in Placement:
        all_s = constraints.seconds_per_param(placement)
        resident, streamed = placement is Placement.RESIDENT, placement is Placement.STREAMED
        per_param[placement] = np.concatenate([all_s, all_s - prefetch_s * streamed, all_s + prefetch_s * resident])
    nothing_s = np.zeros(len(prefetch_s))
    in_backward_s = np.concatenate(
        [nothing_s + windows.backward_s, nothing_s, capacity.prefetched * numel * prefetch_s]
    )
    rows = {
        row + block * len(prefetch_s): resource
        for block in range(3)
        for row, resource in constraints.resource_rows.items()
    }
    return least_bound(
        numel, per_param, rows, -windows.forward_s - in_backward_s, candidate_lines(cost.placements, capacity)
    )


def first_needed_bound(
    workload: Workload, cost: CostModel, windows: Windows, capacity: ResidentCapacity = NO_CAPACITY
) -> Bound:
    """Return a second lower bound of the exposed time: forward needs the first sub-group before it can hide anything.

    The bound is the time of the fastest placement that the first sub-group can have, minus the prefetch that backward
    can hide.
    """
    numel = workload.sub_groups[0].numel
    possible = {
        Placement.CPU: True,
        Placement.STREAMED: capacity.prefetched > 0,
        Placement.RESIDENT: capacity.alone > 0,
    }
    found = []
    for placement in filter(possible.get, cost.placements):
        # Forward does not wait for the flush of the states.
        kinds = [kind for kind in CHAINS[placement] if kind is not ActionKind.FLUSH_STATES]
        seconds = {kind: cost.load(kind, numel).total_s for kind in kinds}
        if ALLOWED_IN_BACKWARD in seconds:
            seconds[ALLOWED_IN_BACKWARD] = max(0.0, seconds[ALLOWED_IN_BACKWARD] - windows.backward_s)
        binding = cost.busiest(max(kinds, key=lambda kind: seconds[kind]))
        shares = PlacementShares(
            streamed=float(placement is Placement.STREAMED), resident=float(placement is Placement.RESIDENT)
        )
        found.append(Bound(seconds=sum(seconds.values()), binding=binding, shares=shares))
    return min(found, key=lambda bound: bound.seconds)


def candidate_lines(
    occurring: Collection[Placement], capacity: ResidentCapacity
) -> list[tuple[PlacementShares, PlacementShares]]:
    """Return the ends of the lines that contain a minimum over the placements ``occurring``.

    There is no line if these placements cannot take all of the parameters.
    """
    alone, with_a_slot = (capacity.alone, capacity.with_a_slot) if Placement.RESIDENT in occurring else (0.0, 0.0)
    on_cpu, streamed = Placement.CPU in occurring, Placement.STREAMED in occurring
    found = []
    if on_cpu or alone >= 1.0:
        found.append((PlacementShares(resident=0.0 if on_cpu else 1.0), PlacementShares(resident=alone)))
    if streamed:
        found.append(
            (
                PlacementShares(resident=with_a_slot) if on_cpu else PlacementShares(streamed=1.0),
                PlacementShares(streamed=1.0 - with_a_slot, resident=with_a_slot),
            )
        )
    return found


def least_bound(
    numel: int,
    per_param: Mapping[Placement, Array],
    resource_rows: Mapping[int, Resource],
    added_s: Array,
    lines: Iterable[tuple[PlacementShares, PlacementShares]],
) -> Bound:
    """Return the bound at the point of ``lines`` at which the busiest constraint is the least busy.

    ``per_param`` has, for each placement, the seconds per parameter of each constraint. ``added_s`` are seconds to add
    to each constraint, negative if they are hidden.
    """

    def busy_s(shares: PlacementShares) -> Array:
        seconds: Array = numel * np.sum(
            [shares.share(placement) * per_param[placement] for placement in Placement], axis=0
        )
        return seconds

    found = []
    for start, end in lines:
        start_s, end_s = busy_s(start) + added_s, busy_s(end) + added_s
        weights = _crossings(start_s, end_s)
        highest_s = (start_s + weights[:, None] * (end_s - start_s)).max(axis=1)
        found.append((float(highest_s.min()), start.interpolate(end, float(weights[highest_s.argmin()]))))
    seconds, shares = min(found, key=lambda pair: pair[0])
    total_s = busy_s(shares) + added_s
    binding = max(resource_rows, key=lambda row: total_s[row])
    return Bound(seconds=max(0.0, seconds), binding=resource_rows[binding], shares=shares)


def _crossings(start_s: Array, end_s: Array) -> Array:
    """Return the weights at which two constraints cross between the ends of a line, and the ends 0 and 1.

    The maximum over the constraints is convex and piecewise linear, so one of these weights minimises it.
    """
    difference_at_start = (start_s[:, None] - start_s[None, :]).ravel()
    difference_at_end = (end_s[:, None] - end_s[None, :]).ravel()
    cross = difference_at_start * difference_at_end < 0.0
    weights: Array = np.concatenate(
        [[0.0, 1.0], difference_at_start[cross] / (difference_at_start - difference_at_end)[cross]]
    )
    return weights


def resources(cost: CostModel) -> list[Resource]:
    """Return the resources in the order of the entries of ``busy_s_per_param``."""
    return list(cost.capacities)


def busy_s_per_param(cost: CostModel) -> dict[Placement, list[float]]:
    """Return, by placement, the seconds per parameter that each of ``resources`` is busy."""
    constraints = ResourceConstraints.from_cost(cost)
    rows = list(constraints.resource_rows)
    return {placement: constraints.seconds_per_param(placement)[rows].tolist() for placement in cost.placements}
