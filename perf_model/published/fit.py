"""Rates from measured runs: least squares on the logarithm of predicted over measured, with weak priors.

A prior says what such machines do, within a factor of two to five; it decides what the runs leave open. Host memory and
publishing from pageable memory explain as much as they can: a link or an accelerator so slow that it binds is one
explanation more, which has to pay for itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from perf_model.published.rates import Rates, binding_link_bytes_per_s
from perf_model.published.runs import Run

Vector = NDArray[np.float64]
Names = tuple[str, ...]

STOCK_NOISE = 0.02
INTERLEAVED_NOISE = 0.07
"""Standard deviations of log(measured). Repeated settings in the published logs show 0.01 and 0.07; the model, too, is
not exact."""

PRICE = 2.71
"""By how much one rate more must lower the sum of squares: what chance alone does in one case of ten (chi squared)."""


class Prior(NamedTuple):
    """Log-normal: ``sigma`` is the standard deviation of the logarithm."""

    median: float
    sigma: float


PRIORS = {
    # Left to the runs: each of them tells it.
    "dram_bytes_per_s": Prior(50e9, 3.0),
    "pageable_bytes_per_s": Prior(6e9, 1.0),
    # PCIe 5 with 16 lanes. That a slower link, or one that is shared, holds the update up has to show.
    "link_bytes_per_s": Prior(48e9, 1.5),
    "gpu_adam_params_per_s": Prior(30e9, 0.7),
}
TYPICAL = Rates(**{name: prior.median for name, prior in PRIORS.items()})


@dataclass(frozen=True, kw_only=True)
class Fit:
    """``names`` are the rates that were fitted, on ``settings`` distinct ones; the others are typical."""

    rates: Rates
    names: Names
    settings: int


def candidates(runs: Sequence[Run]) -> list[Names]:
    """The sets of rates that ``runs`` may determine: never more than there are distinct settings among them."""
    settings = {run.setting for run in runs}
    always = ["dram_bytes_per_s"]
    if any(setting.update_stride is None for setting in settings):
        always.append("pageable_bytes_per_s")
    perhaps = []
    if any(setting.update_stride is not None for setting in settings):
        perhaps.append("link_bytes_per_s")
    if any(setting.cpu_ratio < 1 for setting in settings):
        perhaps.append("gpu_adam_params_per_s")
    always = always[: len(settings)]
    most = min(len(perhaps), len(settings) - len(always))
    return [(*always, *more) for more in chain.from_iterable(combinations(perhaps, n) for n in range(most + 1))]


def fit_rates(runs: Sequence[Run]) -> Fit:
    """Of at least one run."""
    misfit = _Misfit(runs)
    best, least = TYPICAL, float("inf")
    chosen: Names = ()
    for names in candidates(runs):
        for start in _starts(best, names, runs):
            rates, squares = misfit.descend(start, names)
            if squares + PRICE * len(names) < least:
                best, least, chosen = rates, squares + PRICE * len(names), names
    return Fit(rates=best, names=chosen, settings=misfit.settings)


def _starts(found: Rates, names: Names, runs: Sequence[Run]) -> Iterator[Rates]:
    """With links that bind: while transfers are hidden, nothing tells a descent that they might explain a run."""
    start = replace(TYPICAL, **{name: getattr(found, name) for name in names})
    if "link_bytes_per_s" not in names:
        yield start
        return
    stride = min(run.setting.update_stride for run in runs if run.setting.update_stride is not None)
    binding = binding_link_bytes_per_s(start.dram_bytes_per_s, stride)
    for slower in (1, 2, 4):
        yield replace(start, link_bytes_per_s=binding / slower)


class _Misfit:
    """The sum of squares of what ``runs`` and the priors say against some rates."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._settings = list(dict.fromkeys(run.setting for run in runs))
        self._of_run = [self._settings.index(run.setting) for run in runs]
        self._log_measured = np.log([run.measured_s for run in runs])
        stock = [run.setting.update_stride is None for run in runs]
        self._noise = np.where(stock, STOCK_NOISE, INTERLEAVED_NOISE)

    @property
    def settings(self) -> int:
        return len(self._settings)

    def descend(self, rates: Rates, names: Names) -> tuple[Rates, float]:
        """Levenberg-Marquardt in the logarithms of the named rates."""

        def at(logs: Vector) -> Rates:
            return replace(rates, **{name: float(np.exp(log)) for name, log in zip(names, logs, strict=True)})

        logs = np.log([getattr(rates, name) for name in names])
        residuals = self._residuals(at(logs), names)
        damping = 1e-2
        for _ in range(30):
            width = 1e-2
            moved = [self._residuals(at(logs + width * axis), names) for axis in np.eye(len(names))]
            jacobian = (np.stack(moved, axis=1) - residuals[:, None]) / width
            curvature = jacobian.T @ jacobian
            gradient = jacobian.T @ residuals
            # A factor of e^2 at most: rates are far from linear in what they are not near to.
            step = np.clip(-np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), gradient), -2.0, 2.0)
            trial = self._residuals(at(logs + step), names)
            gain = float(residuals @ residuals - trial @ trial)
            if gain > 0:
                logs, residuals = logs + step, trial
            damping = damping / 10 if gain > 0 else damping * 10
            if gain < 1e-3 and (gain > 0 or np.abs(step).max() < 1e-3):
                break
        return at(logs), float(residuals @ residuals)

    def _residuals(self, rates: Rates, names: Names) -> Vector:
        """Of the runs in units of their noise, then of the priors in theirs."""
        predicted = np.log([rates.update_s(setting) for setting in self._settings])
        unexpected = [np.log(getattr(rates, name) / PRIORS[name].median) / PRIORS[name].sigma for name in names]
        return np.concatenate([(predicted[self._of_run] - self._log_measured) / self._noise, unexpected])
