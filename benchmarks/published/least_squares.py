"""Fit positive rates by least squares on the logarithm of predicted over measured, with a log-normal prior per rate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Residuals = Callable[[Mapping[str, float]], Vector]
"""A function that returns log(predicted / measured) of each run, in units of its noise, for named rates."""

DETERMINED_SHARE = 0.5
"""A rate counts as determined by the runs if they reduce the uncertainty of its logarithm to this share or less."""


class Prior(NamedTuple):
    """A log-normal prior: ``sigma`` is the standard deviation of the logarithm."""

    median: float
    sigma: float


@dataclass(frozen=True, kw_only=True)
class FittedRates:
    """The most probable rates. ``determined`` names those that the runs, and not the priors, determine."""

    values: Mapping[str, float]
    determined: tuple[str, ...]


def fit_rates(residuals: Residuals, priors: Mapping[str, Prior]) -> FittedRates:
    """Return the rates that fit best, by Levenberg-Marquardt on their logarithms."""
    names = tuple(priors)
    centers = np.log([prior.median for prior in priors.values()])
    widths = np.array([prior.sigma for prior in priors.values()])

    def rates_of(logs: Vector) -> dict[str, float]:
        return dict(zip(names, map(float, np.exp(logs)), strict=True))

    def at(logs: Vector) -> Vector:
        return np.concatenate([residuals(rates_of(logs)), (logs - centers) / widths])

    def slopes(logs: Vector, current: Vector) -> Vector:
        width = 1e-4
        return np.stack([(at(logs + width * axis) - current) / width for axis in np.eye(len(names))], axis=1)

    logs, current, damping = centers, at(centers), 1e-2
    for _ in range(100):
        jacobian = slopes(logs, current)
        curvature = jacobian.T @ jacobian
        # Change a rate by a factor of e at most: far from the start, the residuals are not linear.
        damped = curvature + damping * np.diag(np.diag(curvature))
        step = np.clip(-np.linalg.solve(damped, jacobian.T @ current), -1.0, 1.0)
        trial = at(logs + step)
        gain = float(current @ current - trial @ trial)
        if gain > 0:
            logs, current = logs + step, trial
        damping = damping / 10 if gain > 0 else damping * 10
        if gain < 1e-6 and (gain > 0 or np.abs(step).max() < 1e-6):
            break
    jacobian = slopes(logs, current)
    sigmas = np.sqrt(np.diag(np.linalg.inv(jacobian.T @ jacobian)))
    is_determined = sigmas <= DETERMINED_SHARE * widths
    determined = tuple(name for name, found in zip(names, is_determined, strict=True) if found)
    return FittedRates(values=rates_of(logs), determined=determined)
