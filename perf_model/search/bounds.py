"""What no schedule can beat: each limit must have its seconds, however well everything overlaps (DESIGN 5).

With shares x of the parameters streamed, r resident and the rest updated on the CPU, a limit (``limits.py``) takes
T(x, r) = (x * streamed + r * resident + (1 - x - r) * cpu) * numel seconds; the update takes at least the maximum over
the limits, and no placement less than the minimum of that over x and r. A resident share takes nothing that a streamed
one does not take as well, so the minimum streams nothing or has as many residents as fit: it is on one of two straight
lines, where two limits cross or at an end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from perf_model.prediction.cost import CostModel, Resource
from perf_model.prediction.memory import cuda_bytes_of, gradients_on_accelerator, resident_bytes_of
from perf_model.prediction.overlap_windows import EARLY, Windows
from perf_model.schedule.action import ActionKind
from perf_model.schedule.happens_before import CHAINS
from perf_model.schedule.placement import Placement
from perf_model.schedule.workload import Workload
from perf_model.search.limits import KINDS, Array, Limits


@dataclass(frozen=True, kw_only=True)
class Mix:
    """Shares of the parameters; the rest is updated on the CPU."""

    streamed: float = 0.0
    resident: float = 0.0

    def of(self, placement: Placement) -> float:
        shares = {Placement.STREAMED: self.streamed, Placement.RESIDENT: self.resident}
        return shares.get(placement, 1.0 - self.streamed - self.resident)

    def towards(self, other: Mix, way: float) -> Mix:
        return Mix(
            streamed=self.streamed + way * (other.streamed - self.streamed),
            resident=self.resident + way * (other.resident - self.resident),
        )


@dataclass(frozen=True, kw_only=True)
class Room:
    """The share of the parameters that can be resident at most: where nothing is streamed, and beside one slot.

    ``prefetched``: the share whose states can be on the accelerator when the step is decided.
    """

    alone: float = 0.0
    beside_a_slot: float = 0.0
    prefetched: float = 1.0

    @classmethod
    def same(cls, share: float) -> Room:
        return cls(alone=share, beside_a_slot=share)

    @classmethod
    def of(cls, workload: Workload, gpu_bytes: int | None) -> Room:
        """With so many bytes of accelerator memory, None for any number; room for the gradients is kept free."""
        if gpu_bytes is None:
            return cls.same(1.0)
        numels = (sub_group.numel for sub_group in workload.sub_groups)
        gpu_bytes -= cuda_bytes_of(gradients_on_accelerator(numels, LEAST_GRADIENT_BYTES)) - MOST_SHARED_BYTES
        slot_bytes = min(resident_bytes_of(sub_group.numel) for sub_group in workload.sub_groups)
        alone = _share_in(gpu_bytes, workload)
        return cls(alone=alone, beside_a_slot=_share_in(gpu_bytes - slot_bytes, workload), prefetched=alone)


LEAST_GRADIENT_BYTES = 2
"""Of a parameter."""

MOST_SHARED_BYTES = 22 * 2**20
"""Of the segments that gradients are in, states can be in the last ones, too."""


def _share_in(gpu_bytes: int, workload: Workload) -> float:
    """No more can be resident than is densest, nor than as many as the least, if they were the largest, have."""
    numels = np.sort([sub_group.numel for sub_group in workload.sub_groups])
    each_bytes = np.array([resident_bytes_of(numel) for numel in numels.tolist()])
    count = int(np.searchsorted(np.cumsum(np.sort(each_bytes)), max(0, gpu_bytes), side="right"))
    densest = np.argsort(each_bytes / numels)
    taken_bytes = np.concatenate([[0], np.cumsum(each_bytes[densest])])
    most = np.interp(max(0, gpu_bytes), taken_bytes, np.concatenate([[0], np.cumsum(numels[densest])]))
    return float(min(most, numels[len(numels) - count :].sum()) / workload.numel)


@dataclass(frozen=True, kw_only=True)
class Bound:
    """``mix`` reaches it; ``binding`` is the resource that has most to do in it."""

    seconds: float
    binding: Resource
    mix: Mix


NO_ROOM = Room()


def work_bound(numel: int, cost: CostModel, room: Room = NO_ROOM) -> Bound:
    """Of all the update's work, exposed and hidden together. ``room``: for residents."""
    return exposed_bound(numel, cost, Windows(), room)


def exposed_bound(numel: int, cost: CostModel, windows: Windows, room: Room = NO_ROOM) -> Bound:
    """Of what is left to be seen when each limit has used its windows; 0 seconds if nothing is.

    Of what a limit has to do, backward can hide no more than it lasts, nothing but prefetches, and of these no more
    than the accelerator has room for beside the residents: three rows for each limit.
    """
    limits = Limits.of(cost)
    early_s = limits.seconds[:, KINDS.index(EARLY)]
    per_param = {}
    for its in Placement:
        all_s = limits.of_placement(its)
        resident, streamed = its is Placement.RESIDENT, its is Placement.STREAMED
        per_param[its] = np.concatenate([all_s, all_s - early_s * streamed, all_s + early_s * resident])
    nothing_s = np.zeros(len(early_s))
    in_backward_s = np.concatenate([nothing_s + windows.backward_s, nothing_s, room.prefetched * numel * early_s])
    rows = {
        row + block * len(early_s): resource for block in range(3) for row, resource in limits.rows_of_resources.items()
    }
    return least(numel, per_param, rows, -windows.forward_s - in_backward_s, lines(cost.placements, room))


def first_needed_bound(workload: Workload, cost: CostModel, windows: Windows, room: Room = NO_ROOM) -> Bound:
    """Of what is seen, too: forward needs the first sub-group before it can hide anything."""
    numel = workload.sub_groups[0].numel
    possible = {Placement.CPU: True, Placement.STREAMED: room.prefetched > 0, Placement.RESIDENT: room.alone > 0}
    found = []
    for its in filter(possible.get, cost.placements):
        # It does not wait for the flush.
        kinds = [kind for kind in CHAINS[its] if kind is not ActionKind.FLUSH_STATES]
        seconds = {kind: cost.load(kind, numel).total_s for kind in kinds}
        if EARLY in seconds:
            seconds[EARLY] = max(0.0, seconds[EARLY] - windows.backward_s)
        binding = cost.busiest(max(kinds, key=lambda kind: seconds[kind]))
        mix = Mix(streamed=float(its is Placement.STREAMED), resident=float(its is Placement.RESIDENT))
        found.append(Bound(seconds=sum(seconds.values()), binding=binding, mix=mix))
    return min(found, key=lambda bound: bound.seconds)


def lines(occurring: Collection[Placement], room: Room) -> list[tuple[Mix, Mix]]:
    """The mixes of these placements among which a least one is; none if they cannot take all of the parameters."""
    alone, beside = (room.alone, room.beside_a_slot) if Placement.RESIDENT in occurring else (0.0, 0.0)
    on_cpu, streamed = Placement.CPU in occurring, Placement.STREAMED in occurring
    found = []
    if on_cpu or alone >= 1.0:
        found.append((Mix(resident=0.0 if on_cpu else 1.0), Mix(resident=alone)))
    if streamed:
        found.append(
            (Mix(resident=beside) if on_cpu else Mix(streamed=1.0), Mix(streamed=1.0 - beside, resident=beside))
        )
    return found


def least(
    numel: int,
    per_param: Mapping[Placement, Array],
    rows_of_resources: Mapping[int, Resource],
    beside_s: Array,
    lines: Iterable[tuple[Mix, Mix]],
) -> Bound:
    """The mix on the lines whose highest limit is the least; each has ``beside_s`` to be added, below 0 if hidden.

    ``per_param``: seconds by placement, a row a limit.
    """

    def busy_s(mix: Mix) -> Array:
        seconds: Array = numel * np.sum([mix.of(its) * per_param[its] for its in Placement], axis=0)
        return seconds

    found = []
    for start, end in lines:
        at_start, at_end = busy_s(start) + beside_s, busy_s(end) + beside_s
        ways = _crossings(at_start, at_end)
        highest_s = (at_start + ways[:, None] * (at_end - at_start)).max(axis=1)
        found.append((float(highest_s.min()), start.towards(end, float(ways[highest_s.argmin()]))))
    seconds, mix = min(found, key=lambda pair: pair[0])
    left_s = busy_s(mix) + beside_s
    binding = max(rows_of_resources, key=lambda row: left_s[row])
    return Bound(seconds=max(0.0, seconds), binding=rows_of_resources[binding], mix=mix)


def _crossings(at_start: Array, at_end: Array) -> Array:
    """Where two lines cross between their ends, and the ends; a minimum of the highest line is among them."""
    apart_at_start = (at_start[:, None] - at_start[None, :]).ravel()
    apart_at_end = (at_end[:, None] - at_end[None, :]).ravel()
    cross = apart_at_start * apart_at_end < 0.0
    ways: Array = np.concatenate([[0.0, 1.0], apart_at_start[cross] / (apart_at_start - apart_at_end)[cross]])
    return ways


def limits(cost: CostModel) -> list[Resource]:
    """What each entry of ``busy_s_per_param`` is of."""
    return list(cost.capacities)


def busy_s_per_param(cost: CostModel) -> dict[Placement, list[float]]:
    """By placement and resource, the seconds in which it has something to do for one parameter."""
    of_resources = Limits.of(cost)
    rows = list(of_resources.rows_of_resources)
    return {its: of_resources.of_placement(its)[rows].tolist() for its in cost.placements}
