"""Derive from measured seconds how fast each kind of action is, relative to the hardware profile.

Concurrent actions slow each other down, so that a measured duration alone does not reveal a rate. The simulation of the
running plan predicts this slowdown. Therefore the rates are those with which the simulated seconds of the running plan,
by kind of action, are the measured ones.

Several sets of rates can explain the same seconds, but a disturbance has few causes: another job takes cores or host
memory bandwidth, or a link or a GPU is throttled. So the scales of the shared resources that explain the seconds are
found first, as few of them as possible. A scale applies to all kinds that use the resource, including those that the
running plan does not execute: both kinds of copies to the GPU share a direction of the link, and all copies and the CPU
updates share host memory. Seconds that no resource explains are then attributed to their kind alone. A kind that is
neither executed nor shares a slower resource keeps the profile's rate: there is no evidence about it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, cycle, islice
from math import exp, log

from perf_model.prediction.cost import CostModel, Resource
from perf_model.prediction.overlap_windows import Windows
from perf_model.prediction.simulate import simulate
from perf_model.schedule.action import ActionKind
from perf_model.schedule.plan import UpdatePlan

Cause = tuple[Resource, ...]
"""Resources whose capacities are reduced together."""

CAUSES: tuple[Cause, ...] = (
    (Resource.CPU,),
    (Resource.GPU,),
    (Resource.DRAM,),
    (Resource.H2D, Resource.D2H, Resource.BOTH),
    (Resource.H2D,),
    (Resource.D2H,),
)
"""The causes of other rates that are considered: cores, GPU, host memory, and the link as a whole or one direction."""

EXPLAINED = 0.03
"""The relative difference up to which simulated seconds explain the measured ones; medians of noisy seconds differ."""

NEGLIGIBLE_SHARE = 0.005
"""A kind with a smaller share of all measured seconds needs no explanation."""

MOST = 50.0
"""The largest slowdown or speed-up. More has another reason than a resource."""

ITERATIONS = 6
"""The number of simulations that find one scale or one factor."""

MAX_CAUSES = 2
"""The most causes that are assumed at the same time."""


@dataclass(frozen=True, kw_only=True)
class RelativeRates:
    """The present rates relative to the profile's.

    ``scales`` are factors on the capacities of the resources of a cause: 0.5 stands for half of the profile's capacity.
    ``kinds`` are factors on the seconds of single kinds of action: 2 stands for half the rate.
    """

    scales: Mapping[Cause, float] = field(default_factory=dict)
    kinds: Mapping[ActionKind, float] = field(default_factory=dict)

    def apply(self, profiled: CostModel) -> CostModel:
        """Return the costs with these rates, given those of the profile.

        A kind with a larger factor needs more of the resource that limits it and as much of the others, so it leaves
        more of these to concurrent actions. A kind with a smaller factor needs less of each resource.
        """
        capacities = dict(profiled.capacities)
        for cause, scale in self.scales.items():
            for resource in cause:
                capacities[resource] *= scale
        scaled = replace(profiled, capacities=capacities)
        per_param = dict(profiled.per_param)
        for kind, factor in self.kinds.items():
            amounts = {resource: min(1.0, factor) * amount for resource, amount in profiled.per_param[kind].items()}
            amounts[scaled.busiest(kind)] = factor * profiled.per_param[kind][scaled.busiest(kind)]
            per_param[kind] = amounts
        return replace(scaled, per_param=per_param)

    def relative(self, profiled: CostModel) -> dict[ActionKind, float]:
        """Return the rate of each kind of action that runs alone, as a multiple of the profile's."""
        scaled = self.apply(profiled)
        relative = {}
        for kind in profiled.per_param:
            before_s, now_s = profiled.load(kind, 1).alone_s, scaled.load(kind, 1).alone_s
            relative[kind] = before_s / now_s if now_s > 0.0 else 1.0
        return relative


PROFILED = RelativeRates()
"""The rates of the profile."""


class RatesFit:
    """The search for the rates that explain the ``measured`` seconds of ``plan`` by kind of action.

    ``profiled`` are the costs with the profile's rates. ``before`` are the rates that were known before: they remain
    known for the resources and kinds that ``plan`` does not use.
    """

    def __init__(
        self,
        plan: UpdatePlan,
        profiled: CostModel,
        windows: Windows,
        measured: Mapping[ActionKind, float],
        before: RelativeRates = PROFILED,
    ) -> None:
        least_s = NEGLIGIBLE_SHARE * sum(measured.values())
        self._plan = plan
        self._profiled = profiled
        self._windows = windows
        self._measured = {kind: kind_s for kind, kind_s in measured.items() if kind_s > least_s}
        self._start = RelativeRates(
            scales={cause: scale for cause, scale in before.scales.items() if not self._used(cause, self._measured)},
            kinds={kind: factor for kind, factor in before.kinds.items() if kind not in self._measured},
        )

    def run(self) -> RelativeRates:
        """Return the rates: of as few resources as possible, and of the kinds that these do not explain."""
        best = self._start, self._errors(self._start)
        unexplained = [kind for kind, error in best[1].items() if abs(error) > EXPLAINED]
        suspects = [cause for cause in CAUSES if self._used(cause, unexplained)]
        for count in range(1, MAX_CAUSES + 1):
            if _is_explained(best[1]):
                break
            candidates = [self._scale(causes) for causes in combinations(suspects, count)]
            explaining = [(rates, errors) for rates, errors in candidates if _is_explained(errors)]
            if explaining:
                best = min(explaining, key=lambda pair: _implausibility(pair[0]))
            else:
                best = min([best, *candidates], key=lambda pair: _badness(pair[1]))
        return self._fit_kinds(*best)

    def _used(self, cause: Cause, kinds: Iterable[ActionKind]) -> bool:
        """Return whether one of ``kinds`` uses a resource of ``cause``."""
        return any(self._profiled.per_param[kind].get(resource, 0.0) > 0.0 for kind in kinds for resource in cause)

    def _scale(self, causes: Sequence[Cause]) -> tuple[RelativeRates, dict[ActionKind, float]]:
        """Return the scales of ``causes`` that explain the most, and the errors that are left.

        The causes are adjusted in turns, each to the kind with the largest error of those that use it: that is the one
        that the resource limits, if there is any.
        """
        rates = replace(self._start, scales={**self._start.scales, **dict.fromkeys(causes, 1.0)})
        errors = self._errors(rates)
        best = rates, errors
        for cause in islice(cycle(causes), ITERATIONS * len(causes)):
            using = [error for kind, error in errors.items() if self._used(cause, [kind])]
            scale = rates.scales[cause] * exp(-max(using, key=abs, default=0.0))
            rates = replace(rates, scales={**rates.scales, cause: min(MOST, max(1 / MOST, scale))})
            errors = self._errors(rates)
            if _badness(errors) < _badness(best[1]):
                best = rates, errors
            if _is_explained(errors):
                break
        return best

    def _fit_kinds(self, rates: RelativeRates, errors: dict[ActionKind, float]) -> RelativeRates:
        """Return ``rates`` with factors of the kinds that are not explained, by fixed-point iteration."""
        for _ in range(2 * ITERATIONS):
            unexplained = {kind for kind, error in errors.items() if abs(error) > EXPLAINED}
            if not unexplained:
                break
            factors = {
                kind: min(MOST, max(1 / MOST, rates.kinds.get(kind, 1.0) * exp(errors[kind])))
                for kind in {*unexplained, *(rates.kinds.keys() & errors.keys())}
            }
            rates = replace(rates, kinds={**rates.kinds, **factors})
            errors = self._errors(rates)
        return rates

    def _errors(self, rates: RelativeRates) -> dict[ActionKind, float]:
        """Return, by kind, the logarithm of the measured over the simulated seconds: positive if it is slower."""
        timeline = simulate(self._plan.schedule, self._plan.workload, rates.apply(self._profiled), self._windows)
        simulated = timeline.seconds_by_kind()
        return {
            kind: log(kind_s / simulated[kind])
            for kind, kind_s in self._measured.items()
            if simulated.get(kind, 0.0) > 0.0
        }


def _is_explained(errors: Mapping[ActionKind, float]) -> bool:
    return all(abs(error) <= EXPLAINED for error in errors.values())


def _implausibility(rates: RelativeRates) -> float:
    """Return a number that is larger for larger changes, and twice as large for a rise of a capacity."""
    changes = map(log, rates.scales.values())
    return sum(2 * change if change > 0 else -change for change in changes)


def _badness(errors: Mapping[ActionKind, float]) -> float:
    return sum(error**2 for error in errors.values())
