"""What no schedule can beat: each resource must do its work, however well everything overlaps (DESIGN 5).

For a share x of the parameters streamed and 1 - x updated on the CPU, resource r is busy for
T_r(x) = (x * streamed_r + (1 - x) * cpu_r) * numel / capacity_r seconds; the update takes at least max over r, and no
placement less than the minimum of that over x. T_r are straight lines, so that the minimum is where two of them cross,
or at an end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

from perf_model.cost import CostModel, Resource
from perf_model.dependencies import CHAINS
from perf_model.placement import Placement


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Seconds in which work is not seen: the tail of backward hides prefetches, forward hides everything."""

    backward_s: float = 0.0
    forward_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Bound:
    """``streamed_fraction`` of the parameters reaches it; ``binding`` is the resource that keeps it from being less."""

    seconds: float
    binding: Resource
    streamed_fraction: float


@dataclass(frozen=True)
class _Line:
    at_zero: float
    at_one: float

    def __call__(self, x: float) -> float:
        return self.at_zero + (self.at_one - self.at_zero) * x


def work_bound(numel: int, cost: CostModel) -> Bound:
    """Of all the update's work, exposed and hidden together."""
    return _least(_busy_lines(numel, cost, Windows()))


def exposed_bound(numel: int, cost: CostModel, windows: Windows) -> Bound:
    """Of what is left to be seen when each resource has used its windows; 0 seconds if nothing is."""
    return _least(_busy_lines(numel, cost, windows))


def work_s(numel: int, streamed_numel: int, cost: CostModel) -> float:
    """What any schedule takes at least that streams so many of ``numel`` parameters."""
    on_cpu = _busy_s(numel - streamed_numel, cost, Placement.CPU)
    streamed = _busy_s(streamed_numel, cost, Placement.STREAMED)
    return max(on_cpu[resource] + streamed[resource] for resource in Resource)


def _busy_lines(numel: int, cost: CostModel, windows: Windows) -> dict[Resource, _Line]:
    on_cpu, streamed = (_busy_s(numel, cost, placement) for placement in (Placement.CPU, Placement.STREAMED))
    lines = {}
    for resource in Resource:
        hidden_s = windows.forward_s + (windows.backward_s if resource in _USED_BY_PREFETCH else 0.0)
        lines[resource] = _Line(on_cpu[resource] - hidden_s, streamed[resource] - hidden_s)
    return lines


_USED_BY_PREFETCH = (Resource.H2D, Resource.BOTH, Resource.DRAM)


def _busy_s(numel: int, cost: CostModel, placement: Placement) -> Mapping[Resource, float]:
    """By resource, if all parameters had that placement."""
    loads = [cost.load(kind, numel) for kind in CHAINS[placement]]
    return {
        resource: sum(load.amounts.get(resource, 0.0) for load in loads) / cost.capacities[resource]
        for resource in Resource
    }


def _least(lines: Mapping[Resource, _Line]) -> Bound:
    candidates = {0.0, 1.0}
    for one, other in combinations(lines.values(), 2):
        slopes = (one.at_one - one.at_zero) - (other.at_one - other.at_zero)
        if slopes != 0.0:
            crossing = (other.at_zero - one.at_zero) / slopes
            if 0.0 < crossing < 1.0:
                candidates.add(crossing)

    def height(x: float) -> float:
        return max(line(x) for line in lines.values())

    best = min(sorted(candidates), key=height)
    binding = max(lines, key=lambda resource: lines[resource](best))
    return Bound(seconds=max(0.0, height(best)), binding=binding, streamed_fraction=best)
