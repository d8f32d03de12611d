"""Add fill and drain to the work bound: the time at the start and the end of an update when not every action can run.

At the start, nothing can be flushed before a unit was prefetched and updated, and nothing can be published before
the CPU has updated a unit. At the end, before the last flush or publish, the same holds in reverse. Meanwhile the
work of a constraint (``resource_constraints.py``) proceeds more slowly, because only some kinds of actions can run. The
smallest unit gives the least time that this takes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import chain, combinations, pairwise

import numpy as np

from perf_model.prediction.cost import CostModel
from perf_model.schedule.action import ActionKind
from perf_model.schedule.happens_before import CHAINS
from perf_model.schedule.placement import Placement
from perf_model.schedule.workload import Workload
from perf_model.search.bounds import (
    NO_CAPACITY,
    Bound,
    candidate_lines,
    least_bound,
    work_bound,
)
from perf_model.search.capacity import ResidentCapacity
from perf_model.search.resource_constraints import KINDS, Array, ResourceConstraints


def fill_and_drain_s(workload: Workload, cost: CostModel, capacity: ResidentCapacity = NO_CAPACITY) -> float:
    """Return the least seconds by which every plan exceeds ``work_bound``; ``capacity`` is for resident units."""
    seconds = bound_with_fill_and_drain(workload, cost, capacity).seconds
    return max(0.0, seconds - work_bound(workload.numel, cost, capacity).seconds)


def bound_with_fill_and_drain(workload: Workload, cost: CostModel, capacity: ResidentCapacity = NO_CAPACITY) -> Bound:
    """Return a lower bound of every plan: that of the busiest constraint, including its idle seconds.

    The bound is the least over the shares of the placements, and over the subsets of placements that occur at all.
    """
    smallest = min(unit.numel for unit in workload.units)
    constraints = ResourceConstraints.from_cost(cost)
    per_param = {placement: constraints.seconds_per_param(placement) for placement in Placement}
    subsets = chain.from_iterable(combinations(cost.placements, count) for count in (1, 2, 3))
    found = []
    for occurring in subsets:
        if Placement.RESIDENT in occurring and capacity.alone == 0.0:
            continue
        if lines := candidate_lines(occurring, capacity):
            idle_s = _idle_s(occurring, smallest, cost, constraints)
            found.append(least_bound(workload.numel, per_param, constraints.resource_rows, idle_s, lines))
    return min(found, key=lambda bound: bound.seconds)


def _idle_s(occurring: Collection[Placement], numel: int, cost: CostModel, constraints: ResourceConstraints) -> Array:
    """Return the idle seconds of each constraint.

    They are the longer of those at the start and those at the end: in a short update, the end may begin before the
    start is over.
    """
    chains = [CHAINS[placement] for placement in occurring]
    seconds = {kind: cost.load(kind, numel).total_s for kinds in chains for kind in kinds}
    at_start = _lost_s(_after_s(chains, seconds), constraints)
    at_end = _lost_s(_after_s([kinds[::-1] for kinds in chains], seconds), constraints)
    return np.maximum(at_start, at_end)


def _after_s(chains: Iterable[tuple[ActionKind, ...]], seconds: Mapping[ActionKind, float]) -> dict[ActionKind, float]:
    """Return, for each kind of action, the seconds after which it can first run."""
    after_s: dict[ActionKind, float] = {}
    for kinds in chains:
        passed_s = 0.0
        for kind in kinds:
            after_s[kind] = min(after_s.get(kind, passed_s), passed_s)
            passed_s += seconds[kind]
    return after_s


def _lost_s(after_s: Mapping[ActionKind, float], constraints: ResourceConstraints) -> Array:
    """Return, for each constraint, the seconds that it loses until every kind of action that occurs can run."""
    lost_s = np.zeros(len(constraints.seconds))
    moments_s = sorted(set(after_s.values()))
    for now_s, then_s in pairwise(moments_s):
        impossible = [index for index, kind in enumerate(KINDS) if after_s.get(kind, then_s) > now_s]
        running = constraints.concurrent_rates[(constraints.concurrent_rates[:, impossible] == 0.0).all(axis=1)]
        lost_s += (then_s - now_s) * np.maximum(0.0, 1.0 - (running @ constraints.seconds.T).max(axis=0))
    return lost_s
