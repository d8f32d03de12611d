"""Derive the constraints on the speed of an update: the seconds that each of them takes per parameter.

A constraint assigns to each kind of action a number of seconds per parameter. The numbers are chosen such that all
actions together complete at most one of these seconds per second of real time, even if actions overlap. So an update
takes at least the sum of the seconds of all its actions.

Each resource gives one constraint: the amount of the resource that an action uses per parameter, divided by the
capacity. Sharper constraints follow from the speeds of concurrent actions (``cost.relative_speeds``). The seconds that
are possible at all of these speeds form a polytope. Its corners are the constraints that cannot be raised any further.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import combinations, product

import numpy as np
import numpy.typing as npt

from perf_model.prediction.cost import CostModel, Resource, relative_speeds
from perf_model.schedule.action import ActionKind, Lane
from perf_model.schedule.happens_before import CHAINS
from perf_model.schedule.placement import Placement

Array = npt.NDArray[np.float64]

KINDS = tuple(ActionKind)
"""The columns of all arrays that have one column per kind of action."""

_TOLERANCE = 1e-9


@dataclass(frozen=True, kw_only=True, eq=False)
class ResourceConstraints:
    """All constraints of one machine.

    ``seconds`` has a row per constraint and a column per kind of action: seconds per parameter. ``resource_rows`` names
    the rows that are the constraints of a single resource. ``concurrent_rates`` has a row per set of actions that can
    run concurrently: the parameters per second of each kind, 0 for kinds that are not in the set.
    """

    resource_rows: Mapping[int, Resource]
    seconds: Array
    concurrent_rates: Array

    @classmethod
    @lru_cache(maxsize=16)
    def from_cost(cls, cost: CostModel) -> ResourceConstraints:
        """Return the constraints of the machine that ``cost`` describes; for equal costs they are derived once."""
        possible = {kind for placement in cost.placements for kind in CHAINS[placement]}
        by_resource = [
            [_amount(cost, kind, resource) / capacity if kind in possible else 0.0 for kind in KINDS]
            for resource, capacity in cost.capacities.items()
        ]
        concurrent_rates = np.array(
            [_rates(cost, kinds) for kinds in _concurrent_kinds([kind for kind in KINDS if kind in possible])]
        )
        return cls(
            resource_rows=dict(enumerate(cost.capacities)),
            seconds=np.array([*by_resource, *_corners(concurrent_rates)]),
            concurrent_rates=concurrent_rates,
        )

    def seconds_per_param(self, placement: Placement) -> Array:
        """Return, for each constraint, the seconds that one parameter with ``placement`` takes."""
        return self._by_placement[placement]

    @cached_property
    def _by_placement(self) -> dict[Placement, Array]:
        return {
            placement: self.seconds[:, [KINDS.index(kind) for kind in chain]].sum(axis=1)
            for placement, chain in CHAINS.items()
        }


def _amount(cost: CostModel, kind: ActionKind, resource: Resource) -> float:
    return cost.per_param[kind].get(resource, 0.0)


def _concurrent_kinds(possible: Sequence[ActionKind]) -> Iterator[tuple[ActionKind, ...]]:
    """Yield every set of kinds that can run concurrently: at most one kind per lane, and not the empty set."""
    by_lane = [[None, *(kind for kind in possible if kind.lane is lane)] for lane in Lane]
    for chosen in product(*by_lane):
        if kinds := tuple(kind for kind in chosen if kind is not None):
            yield kinds


def _rates(cost: CostModel, kinds: tuple[ActionKind, ...]) -> list[float]:
    """Return the parameters per second of each kind while exactly ``kinds`` run concurrently."""
    loads = [cost.load(kind, 1) for kind in kinds]
    rates = {
        kind: speed / load.alone_s
        for kind, load, speed in zip(kinds, loads, relative_speeds(loads, cost.capacities), strict=True)
        if load.alone_s > 0
    }
    return [rates.get(kind, 0.0) for kind in KINDS]


def _corners(concurrent_rates: Array) -> Array:
    """Return the corners of {seconds >= 0: concurrent_rates @ seconds <= 1}, without those that others dominate.

    GPU_STEP is left out, which keeps the corners few. On a GPU it slows no other action, and a constraint without it
    is valid in any case.
    """
    columns = [
        index
        for index, kind in enumerate(KINDS)
        if concurrent_rates[:, index].any() and kind is not ActionKind.GPU_STEP
    ]
    scale = concurrent_rates[:, columns].max(axis=0)
    planes = np.vstack([concurrent_rates[:, columns] / scale, -np.eye(len(columns))])
    heights = np.concatenate([np.ones(len(concurrent_rates)), np.zeros(len(columns))])
    planes, kept = np.unique(np.round(planes, 12), axis=0, return_index=True)
    heights = heights[kept]
    # Every corner is the intersection of as many planes as there are dimensions.
    chosen = np.array(list(combinations(range(len(planes)), len(columns))))
    systems = planes[chosen]
    regular = np.abs(np.linalg.det(systems)) > _TOLERANCE
    points = np.linalg.solve(systems[regular], heights[chosen[regular]][..., None])[..., 0]
    inside = (points @ planes.T <= heights + _TOLERANCE).all(axis=1)
    points = np.unique(np.round(np.maximum(points[inside], 0.0), 10), axis=0)
    # A corner that is nowhere above another corner gives no sharper bound than that other corner.
    one, other = points[:, None, :], points[None, :, :]
    below: npt.NDArray[np.bool_] = np.all(one <= other, axis=2) & np.any(one < other, axis=2)
    points = points[~np.any(below, axis=1)]
    corners = np.zeros((len(points), len(KINDS)))
    corners[:, columns] = points / scale
    # Rounding must not raise a constraint.
    corners *= 1.0 - _TOLERANCE
    return corners
