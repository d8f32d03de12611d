"""Compute lower bounds: no schedule can finish before its busiest resource has done its work.

Let x be the share of the parameters that is streamed, and r the share that is resident. The CPU updates the other
parameters, the share 1 - x - r. Let ``streamed``, ``resident`` and ``cpu`` be the seconds per parameter that a
constraint (``resource_constraints.py``) assigns to each placement. Then the constraint is busy for

    T(x, r) = (x * streamed + r * resident + (1 - x - r) * cpu) * numel

seconds. An update takes at least the maximum of T over all constraints. So the best update takes at least the minimum
of this maximum over x and r.

A streamed parameter uses at least as much of each constraint as a resident one. So at the minimum, either nothing is
streamed, or as many parameters are resident as fit next to those that are streamed. In the plane of x and r, the first
case is a straight line, and the second one is a few of them. On a line, the minimum is at an end, or at a point where
two constraints have the same T.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from perf_model.prediction.cost import CostModel, Resource
from perf_model.prediction.overlap_windows import ALLOWED_IN_BACKWARD, Windows
from perf_model.schedule.action import ActionKind
from perf_model.schedule.happens_before import CHAINS
from perf_model.schedule.placement import Placement
from perf_model.schedule.workload import Workload
from perf_model.search.capacity import ResidentCapacity
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
class Bound:
    """A lower bound of the time of an update.

    ``shares`` reach it if nothing else slows them, and ``binding`` is the resource that is busiest then.
    """

    seconds: float
    binding: Resource
    shares: PlacementShares


NO_CAPACITY = ResidentCapacity()
"""No GPU memory for residents."""


@lru_cache(maxsize=256)
def work_bound(numel: int, cost: CostModel, capacity: ResidentCapacity = NO_CAPACITY) -> Bound:
    """Return a lower bound of all the work of the update: exposed and hidden time together."""
    return exposed_bound(numel, cost, Windows(), capacity)


def exposed_bound(numel: int, cost: CostModel, windows: Windows, capacity: ResidentCapacity = NO_CAPACITY) -> Bound:
    """Return a lower bound of the exposed time of the update, at least 0 s.

    The bound is the maximum, over all constraints, of the busy time minus the time that backward and forward can hide.
    Forward can hide any work, but no more than its own duration. The time that backward can hide has three limits, and
    each constraint has one row per limit:

    1. It is at most the duration of backward.
    2. It is at most the time of all prefetches, and with a window of forward also of all flushes, because backward
       hides no other action.
    3. It is at most the time of those of the states that fit on the accelerator next to the resident states: the
       prefetches before the update fill the slots, and the flushes after forward empty them.
    """
    constraints = ResourceConstraints.from_cost(cost)
    hidden_s = constraints.seconds[:, [KINDS.index(kind) for kind in windows.hidden_in_backward]].sum(axis=1)
    per_param = {}
    for placement in Placement:
        all_s = constraints.seconds_per_param(placement)
        resident, streamed = placement is Placement.RESIDENT, placement is Placement.STREAMED
        per_param[placement] = np.concatenate([all_s, all_s - hidden_s * streamed, all_s + hidden_s * resident])
    nothing_s = np.zeros(len(hidden_s))
    in_backward_s = np.concatenate([nothing_s + windows.backward_s, nothing_s, capacity.prefetched * numel * hidden_s])
    rows = {
        row + block * len(hidden_s): resource
        for block in range(3)
        for row, resource in constraints.resource_rows.items()
    }
    return least_bound(
        numel, per_param, rows, -windows.forward_s - in_backward_s, candidate_lines(cost.placements, capacity)
    )


def first_needed_bound(
    workload: Workload, cost: CostModel, windows: Windows, capacity: ResidentCapacity = NO_CAPACITY
) -> Bound:
    """Return a second lower bound of the exposed time: forward needs its first unit before it can hide anything.

    The bound is the time of the fastest placement that this unit can have, minus the prefetch that backward can hide.
    """
    numel = workload.units[0 if windows.first_use is None else windows.first_use[0]].numel
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


def sharpest_exposed_bound(
    workload: Workload, cost: CostModel, windows: Windows, capacity: ResidentCapacity = NO_CAPACITY
) -> Bound:
    """Return the larger of the two lower bounds of the exposed time."""
    bounds = (
        exposed_bound(workload.numel, cost, windows, capacity),
        first_needed_bound(workload, cost, windows, capacity),
    )
    return max(bounds, key=lambda bound: bound.seconds)


def candidate_lines(
    occurring: Collection[Placement], capacity: ResidentCapacity
) -> list[tuple[PlacementShares, PlacementShares]]:
    """Return the ends of the lines that contain a minimum over the placements ``occurring``.

    There is no line if these placements cannot take all of the parameters.
    """
    resides, streams = Placement.RESIDENT in occurring, Placement.STREAMED in occurring
    on_cpu = Placement.CPU in occurring
    alone = capacity.alone if resides else 0.0
    found = []
    if on_cpu or alone >= 1.0:
        found.append((PlacementShares(resident=0.0 if on_cpu else 1.0), PlacementShares(resident=alone)))
    if streams:
        points = [
            PlacementShares(streamed=share, resident=capacity.next_to_streamed(share) if resides else 0.0)
            for share in _corners(capacity)
        ]
        if not on_cpu:
            # Without the CPU, all parameters are streamed or resident.
            points = [point for point in points if point.streamed + point.resident >= 1.0 - _ROUNDING]
        found += pairwise(points) if len(points) > 1 else [(point, point) for point in points]
    return found


_ROUNDING = 1e-12


def _corners(capacity: ResidentCapacity) -> list[float]:
    """Return the streamed shares at which the most residents next to them change direction, and the ends."""
    lost, most = capacity.lost_to_gradients, capacity.most_streamed
    corners = {0.0, most, 1.0 - capacity.with_a_slot}
    if lost > 0.0:
        corners |= {
            (capacity.next_to_gradients - capacity.with_a_slot) / lost,
            (1.0 - capacity.next_to_gradients) / (1.0 - lost),
        }
    return sorted(corner for corner in corners if 0.0 <= corner <= most)


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
        cpu, streamed, resident = (shares.share(placement) * per_param[placement] for placement in Placement)
        seconds: Array = numel * (cpu + streamed + resident)
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
    return list(ResourceConstraints.from_cost(cost).resource_rows.values())


def busy_s_per_param(cost: CostModel) -> dict[Placement, list[float]]:
    """Return, by placement, the seconds per parameter that each of ``resources`` is busy."""
    constraints = ResourceConstraints.from_cost(cost)
    rows = list(constraints.resource_rows)
    return {placement: constraints.seconds_per_param(placement)[rows].tolist() for placement in cost.placements}
