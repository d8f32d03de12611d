"""What the work bound leaves out: at the start and at the end of an update not everything can be done yet, or any more.

Nothing is flushed before a sub-group was prefetched and updated, nothing published before the CPU updated one, and
before the last flush or publish the same the other way round. Meanwhile a limit (``limits.py``) passes more slowly, by
what can run; how long that takes at least, the smallest sub-group says.
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
from perf_model.search.bounds import NO_ROOM, Bound, Room, least, lines, work_bound
from perf_model.search.limits import KINDS, Array, Limits


def fill_and_drain_s(workload: Workload, cost: CostModel, room: Room = NO_ROOM) -> float:
    """Seconds by which every plan exceeds ``work_bound``; ``room``: for residents."""
    seconds = bound_with_fill_and_drain(workload, cost, room).seconds
    return max(0.0, seconds - work_bound(workload.numel, cost, room).seconds)


def bound_with_fill_and_drain(workload: Workload, cost: CostModel, room: Room = NO_ROOM) -> Bound:
    """The least over the mixes, and over which placements occur at all, of the highest limit and its idle seconds."""
    smallest = min(sub_group.numel for sub_group in workload.sub_groups)
    limits = Limits.of(cost)
    per_param = {its: limits.of_placement(its) for its in Placement}
    subsets = chain.from_iterable(combinations(cost.placements, count) for count in (1, 2, 3))
    found = []
    for occurring in subsets:
        if Placement.RESIDENT in occurring and room.alone == 0.0:
            continue
        if mixes := lines(occurring, room):
            idle_s = _idle_s(occurring, smallest, cost, limits)
            found.append(least(workload.numel, per_param, limits.rows_of_resources, idle_s, mixes))
    return min(found, key=lambda bound: bound.seconds)


def _idle_s(occurring: Collection[Placement], numel: int, cost: CostModel, limits: Limits) -> Array:
    """By limit. The longer of the two, as in a short update the end may begin before the start is over."""
    chains = [CHAINS[its] for its in occurring]
    seconds = {kind: cost.load(kind, numel).total_s for its in chains for kind in its}
    at_start = _lost_s(_after_s(chains, seconds), limits)
    at_end = _lost_s(_after_s([its[::-1] for its in chains], seconds), limits)
    return np.maximum(at_start, at_end)


def _after_s(chains: Iterable[tuple[ActionKind, ...]], seconds: Mapping[ActionKind, float]) -> dict[ActionKind, float]:
    """By kind, the seconds after which it is possible at the earliest."""
    after_s: dict[ActionKind, float] = {}
    for its in chains:
        passed_s = 0.0
        for kind in its:
            after_s[kind] = min(after_s.get(kind, passed_s), passed_s)
            passed_s += seconds[kind]
    return after_s


def _lost_s(after_s: Mapping[ActionKind, float], limits: Limits) -> Array:
    """By limit, how much less of it passes than seconds do until all kinds are possible that occur."""
    lost_s = np.zeros(len(limits.seconds))
    moments_s = sorted(set(after_s.values()))
    for now_s, then_s in pairwise(moments_s):
        impossible = [index for index, kind in enumerate(KINDS) if after_s.get(kind, then_s) > now_s]
        running = limits.together[(limits.together[:, impossible] == 0.0).all(axis=1)]
        lost_s += (then_s - now_s) * np.maximum(0.0, 1.0 - (running @ limits.seconds.T).max(axis=0))
    return lost_s
