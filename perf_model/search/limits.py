"""``Limits``: what keeps an update from being faster, in seconds that a parameter takes of the whole.

A limit gives each kind of action seconds a parameter, such that of whatever can run together no more than one of these
seconds passes in a second. An update then takes at least the sum over its actions. Each resource is such a limit, by
what an action uses of it. Sharper ones follow from how fast actions run beside each other (``sharing.py``): those that
cannot be raised any more are the corners of all that is permitted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product

import numpy as np
import numpy.typing as npt

from perf_model.prediction.cost import CostModel, Resource, shares
from perf_model.schedule.action import ActionKind, Lane
from perf_model.schedule.happens_before import CHAINS
from perf_model.schedule.placement import Placement

Array = npt.NDArray[np.float64]

KINDS = tuple(ActionKind)

_TOLERANCE = 1e-9


@dataclass(frozen=True, kw_only=True, eq=False)
class Limits:
    """``seconds``: a row a limit, a column a kind, a parameter. ``rows_of_resources`` are those of single resources.

    ``together``: a row a set of actions that can run beside each other, their parameters a second; 0: does not run.
    """

    rows_of_resources: Mapping[int, Resource]
    seconds: Array
    together: Array

    @classmethod
    def of(cls, cost: CostModel) -> Limits:
        possible = {kind for its in cost.placements for kind in CHAINS[its]}
        of_resources = [
            [_amount(cost, kind, resource) / capacity if kind in possible else 0.0 for kind in KINDS]
            for resource, capacity in cost.capacities.items()
        ]
        together = np.array([_speeds(cost, kinds) for kinds in _sets([kind for kind in KINDS if kind in possible])])
        return cls(
            rows_of_resources=dict(enumerate(cost.capacities)),
            seconds=np.array([*of_resources, *_corners(together)]),
            together=together,
        )

    def of_placement(self, placement: Placement) -> Array:
        """Seconds a parameter, by limit."""
        of_chain: Array = self.seconds[:, [KINDS.index(kind) for kind in CHAINS[placement]]].sum(axis=1)
        return of_chain


def _amount(cost: CostModel, kind: ActionKind, resource: Resource) -> float:
    return cost.per_param[kind].get(resource, 0.0)


def _sets(possible: Sequence[ActionKind]) -> Iterator[tuple[ActionKind, ...]]:
    """At most one action a lane, and at least one in all."""
    by_lane = [[None, *(kind for kind in possible if kind.lane is lane)] for lane in Lane]
    for chosen in product(*by_lane):
        if kinds := tuple(kind for kind in chosen if kind is not None):
            yield kinds


def _speeds(cost: CostModel, kinds: tuple[ActionKind, ...]) -> list[float]:
    loads = [cost.load(kind, 1) for kind in kinds]
    speeds = {
        kind: share / load.alone_s
        for kind, load, share in zip(kinds, loads, shares(loads, cost.capacities), strict=True)
        if load.alone_s > 0
    }
    return [speeds.get(kind, 0.0) for kind in KINDS]


def _corners(together: Array) -> Array:
    """Of {seconds >= 0: together @ seconds <= 1}, without GPU_STEP: on a GPU it slows nobody, and a limit without it
    holds in any case. So there are few corners."""
    columns = [
        index for index, kind in enumerate(KINDS) if together[:, index].any() and kind is not ActionKind.GPU_STEP
    ]
    scale = together[:, columns].max(axis=0)
    planes = np.vstack([together[:, columns] / scale, -np.eye(len(columns))])
    heights = np.concatenate([np.ones(len(together)), np.zeros(len(columns))])
    planes, kept = np.unique(np.round(planes, 12), axis=0, return_index=True)
    heights = heights[kept]
    chosen = np.array(list(combinations(range(len(planes)), len(columns))))
    systems = planes[chosen]
    regular = np.abs(np.linalg.det(systems)) > _TOLERANCE
    points = np.linalg.solve(systems[regular], heights[chosen[regular]][..., None])[..., 0]
    inside = (points @ planes.T <= heights + _TOLERANCE).all(axis=1)
    points = np.unique(np.round(np.maximum(points[inside], 0.0), 10), axis=0)
    # A corner below another one in every respect says nothing.
    one, other = points[:, None, :], points[None, :, :]
    below: npt.NDArray[np.bool_] = np.all(one <= other, axis=2) & np.any(one < other, axis=2)
    points = points[~np.any(below, axis=1)]
    corners = np.zeros((len(points), len(KINDS)))
    corners[:, columns] = points / scale
    # Rounding must not make a limit higher than it is.
    corners *= 1.0 - _TOLERANCE
    return corners
