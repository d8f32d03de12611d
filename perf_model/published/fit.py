"""Fit rates to measured runs: least squares on the logarithm of predicted over measured time, with weak priors.

A prior is the rate of a typical machine, within a factor of two to five; it decides where the runs do not determine a
rate. Times are explained by host memory and by publishing from pageable memory as far as possible. A link or an
accelerator that is so slow that it limits the update is a further explanation, and must improve the fit by more than a
penalty.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from perf_model.published.rates import Rates, binding_link_bytes_per_s
from perf_model.published.runs import MeasuredRun

Vector = NDArray[np.float64]
Names = tuple[str, ...]

STOCK_NOISE = 0.02
INTERLEAVED_NOISE = 0.07
"""Standard deviations of log(measured time). Repeated settings in the published logs show 0.01 and 0.07, and the model
is not exact either."""

PENALTY_PER_RATE = 2.71
"""The least decrease of the sum of squares that justifies one more rate. Chance alone reaches it in one case of ten
(chi squared)."""


class Prior(NamedTuple):
    """A log-normal prior: ``sigma`` is the standard deviation of the logarithm."""

    median: float
    sigma: float


PRIORS = {
    # This prior is so wide that the runs alone determine the rate: every run depends on it.
    "dram_bytes_per_s": Prior(50e9, 3.0),
    "pageable_bytes_per_s": Prior(6e9, 1.0),
    # PCIe 5 with 16 lanes. The runs have to show that a slower or shared link limits the update.
    "link_bytes_per_s": Prior(48e9, 1.5),
    "gpu_adam_params_per_s": Prior(30e9, 0.7),
}
TYPICAL = Rates(**{name: prior.median for name, prior in PRIORS.items()})
"""The medians of the priors."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The fitted rates of one machine.

    ``names`` are the rates that were fitted, on ``settings`` distinct settings; the other rates are typical.
    """

    rates: Rates
    names: Names
    settings: int


def candidates(runs: Sequence[MeasuredRun]) -> list[Names]:
    """Return the sets of rates that ``runs`` may determine: never more rates than distinct settings among the runs."""
    settings = {run.setting for run in runs}
    always = ["dram_bytes_per_s"]
    if any(setting.update_stride is None for setting in settings):
        always.append("pageable_bytes_per_s")
    optional = []
    if any(setting.update_stride is not None for setting in settings):
        optional.append("link_bytes_per_s")
    if any(setting.cpu_ratio < 1 for setting in settings):
        optional.append("gpu_adam_params_per_s")
    always = always[: len(settings)]
    most = min(len(optional), len(settings) - len(always))
    return [(*always, *more) for more in chain.from_iterable(combinations(optional, n) for n in range(most + 1))]


def fit_rates(runs: Sequence[MeasuredRun]) -> Fit:
    """Return the rates that fit ``runs`` best, with a penalty per fitted rate. There must be at least one run."""
    misfit = _Misfit(runs)
    best, least = TYPICAL, float("inf")
    chosen: Names = ()
    for names in candidates(runs):
        for start in _starts(best, names, runs):
            rates, squares = misfit.descend(start, names)
            if squares + PENALTY_PER_RATE * len(names) < least:
                best, least, chosen = rates, squares + PENALTY_PER_RATE * len(names), names
    return Fit(rates=best, names=chosen, settings=misfit.settings)


def _starts(found: Rates, names: Names, runs: Sequence[MeasuredRun]) -> Iterator[Rates]:
    """Yield rates to start from, with a link that limits the update.

    While transfers are hidden, the gradient of the link's rate is 0, so a descent would never make the link the limit.
    """
    start = replace(TYPICAL, **{name: getattr(found, name) for name in names})
    if "link_bytes_per_s" not in names:
        yield start
        return
    stride = min(run.setting.update_stride for run in runs if run.setting.update_stride is not None)
    binding = binding_link_bytes_per_s(start.dram_bytes_per_s, stride)
    for slower in (1, 2, 4):
        yield replace(start, link_bytes_per_s=binding / slower)


class _Misfit:
    """The deviation of ``runs`` and priors from the prediction with some rates, as a sum of squares."""

    def __init__(self, runs: Sequence[MeasuredRun]) -> None:
        self._settings = list(dict.fromkeys(run.setting for run in runs))
        self._setting_of_run = [self._settings.index(run.setting) for run in runs]
        self._log_measured = np.log([run.measured_s for run in runs])
        stock = [run.setting.update_stride is None for run in runs]
        self._noise = np.where(stock, STOCK_NOISE, INTERLEAVED_NOISE)

    @property
    def settings(self) -> int:
        """Return the number of distinct settings."""
        return len(self._settings)

    def descend(self, rates: Rates, names: Names) -> tuple[Rates, float]:
        """Fit the named rates by Levenberg-Marquardt on their logarithms; return the rates and the sum of squares."""

        def rates_at(logs: Vector) -> Rates:
            return replace(rates, **{name: float(np.exp(log)) for name, log in zip(names, logs, strict=True)})

        logs = np.log([getattr(rates, name) for name in names])
        residuals = self._residuals(rates_at(logs), names)
        damping = 1e-2
        for _ in range(30):
            width = 1e-2
            moved = [self._residuals(rates_at(logs + width * axis), names) for axis in np.eye(len(names))]
            jacobian = (np.stack(moved, axis=1) - residuals[:, None]) / width
            curvature = jacobian.T @ jacobian
            gradient = jacobian.T @ residuals
            # Change a rate by a factor of e^2 at most: far from the start, the residuals are not linear.
            step = np.clip(-np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), gradient), -2.0, 2.0)
            trial = self._residuals(rates_at(logs + step), names)
            gain = float(residuals @ residuals - trial @ trial)
            if gain > 0:
                logs, residuals = logs + step, trial
            damping = damping / 10 if gain > 0 else damping * 10
            if gain < 1e-3 and (gain > 0 or np.abs(step).max() < 1e-3):
                break
        return rates_at(logs), float(residuals @ residuals)

    def _residuals(self, rates: Rates, names: Names) -> Vector:
        """Return the residuals of the runs in units of their noise, then those of the priors in units of ``sigma``."""
        predicted = np.log([rates.update_s(setting) for setting in self._settings])
        from_priors = [np.log(getattr(rates, name) / PRIORS[name].median) / PRIORS[name].sigma for name in names]
        return np.concatenate([(predicted[self._setting_of_run] - self._log_measured) / self._noise, from_priors])
