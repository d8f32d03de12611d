"""Choose the runs that rates are fitted on, predict the other runs, and compute the errors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from perf_model.published.fit import Fit, fit_rates
from perf_model.published.runs import MeasuredRun

LINE_STRIDES = 4
"""The least number of strides for the baseline: its line goes through two strides, and is compared at two others."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The prediction of one run.

    ``line_s`` is that of the baseline, a straight line in 1/stride; None if the line does not apply or was fitted on
    the run.
    """

    run: MeasuredRun
    predicted_s: float
    fitted: bool
    line_s: float | None

    @property
    def error(self) -> float:
        """Return the relative error, positive if the prediction is too long."""
        return self.predicted_s / self.run.measured_s - 1

    def to_json_dict(self) -> dict[str, object]:
        """Return the prediction as it is written to JSON."""
        return {
            "sweep": self.run.sweep,
            "model_name": self.run.model_name,
            "update_stride": self.run.setting.update_stride,
            "measured_s": self.run.measured_s,
            "predicted_s": self.predicted_s,
            "fitted": self.fitted,
        }


@dataclass(frozen=True, kw_only=True)
class RunGroup:
    """Runs that share rates. ``positions`` are their positions in the file."""

    name: str
    tp: int
    dp: int
    fit: Fit
    positions: tuple[int, ...]


class ErrorSummary(NamedTuple):
    """The number of runs, and the median and 90th percentile of their absolute relative errors."""

    runs: int
    median: float
    p90: float

    @classmethod
    def from_errors(cls, errors: Iterable[float]) -> ErrorSummary | None:
        """Return the summary of relative errors, or None if there are none."""
        absolute = np.abs(list(errors))
        if not len(absolute):
            return None
        return cls(len(absolute), float(np.median(absolute)), float(np.percentile(absolute, 90)))


@dataclass(frozen=True, kw_only=True)
class Validation:
    """The groups, and the predictions of all runs, also of the fitted ones, in the order of the file."""

    groups: tuple[RunGroup, ...]
    predictions: tuple[Prediction, ...]

    @property
    def errors(self) -> ErrorSummary | None:
        """Return the errors of the runs that were not fitted, or None if all were fitted."""
        return ErrorSummary.from_errors(prediction.error for prediction in self.predictions if not prediction.fitted)

    @property
    def compared_with_line(self) -> tuple[ErrorSummary, ErrorSummary] | None:
        """Return the errors of the model and of the line, over the runs that the line applies to; None if none."""
        both = [prediction for prediction in self.predictions if prediction.line_s is not None]
        ours = ErrorSummary.from_errors(prediction.error for prediction in both)
        line = ErrorSummary.from_errors(
            prediction.line_s / prediction.run.measured_s - 1 for prediction in both if prediction.line_s is not None
        )
        return None if ours is None or line is None else (ours, line)

    def to_json_dict(self) -> dict[str, object]:
        """Return the validation as it is written to JSON."""
        errors = self.errors
        return {
            "runs": [prediction.to_json_dict() for prediction in self.predictions],
            "median_abs_rel_error": None if errors is None else errors.median,
            "p90_abs_rel_error": None if errors is None else errors.p90,
        }


def validate(runs: Sequence[MeasuredRun], across_models: bool) -> Validation:
    """Fit a few runs of each group, and predict all runs.

    A group is the runs of one sweep with one tp and dp. Its runs without interleaving are fitted, and one run each with
    the least and the greatest stride. With ``across_models``, a group is the runs of one machine over all sweeps, and
    the smaller half of its models, rounded up, is fitted.
    """
    members: dict[tuple[str, int, int], list[int]] = defaultdict(list)
    for position, run in enumerate(runs):
        members[run.machine if across_models else run.sweep, run.tp, run.dp].append(position)
    groups = []
    predictions: dict[int, Prediction] = {}
    for (name, tp, dp), positions in members.items():
        group = {position: runs[position] for position in positions}
        fitted = _smaller_models(group) if across_models else _outermost_strides(group)
        fit = fit_rates([group[position] for position in sorted(fitted)])
        line = {} if across_models else _line(group, fitted)
        groups.append(RunGroup(name=name, tp=tp, dp=dp, fit=fit, positions=tuple(positions)))
        predicted_s = {setting: fit.rates.update_s(setting) for setting in {run.setting for run in group.values()}}
        for position, run in group.items():
            predictions[position] = Prediction(
                run=run,
                predicted_s=predicted_s[run.setting],
                fitted=position in fitted,
                line_s=line.get(position),
            )
    return Validation(groups=tuple(groups), predictions=tuple(predictions[position] for position in range(len(runs))))


def _outermost_strides(runs: Mapping[int, MeasuredRun]) -> set[int]:
    """Return the runs to fit: those that are not interleaved, one of the least and one of the greatest stride.

    Of several runs, the first one of the least stride and the last one of the greatest stride is fitted.
    """
    strides = _strides(runs)
    fitted = set(runs) - set(strides)
    if strides:
        fitted |= {
            min(strides, key=lambda position: (strides[position], position)),
            max(strides, key=lambda position: (strides[position], position)),
        }
    return fitted


def _smaller_models(runs: Mapping[int, MeasuredRun]) -> set[int]:
    """Return the runs to fit: those of the smaller half of the models."""
    models = sorted({_model(run) for run in runs.values()})
    smaller = models[: (len(models) + 1) // 2]
    return {position for position, run in runs.items() if _model(run) in smaller}


def _model(run: MeasuredRun) -> tuple[int, str]:
    return run.setting.real_params, run.model_name


def _strides(runs: Mapping[int, MeasuredRun]) -> dict[int, int]:
    """Return the strides of the interleaved runs, by position."""
    pairs = ((position, run.setting.update_stride) for position, run in runs.items())
    return {position: stride for position, stride in pairs if stride is not None}


def _line(runs: Mapping[int, MeasuredRun], fitted: set[int]) -> dict[int, float]:
    """Return the seconds of each run that is not fitted, on the line in 1/stride through the two fitted runs."""
    strides = _strides(runs)
    settings = {replace(runs[position].setting, update_stride=None) for position in strides}
    if len(set(strides.values())) < LINE_STRIDES or len(settings) > 1:
        return {}
    ends = sorted(set(strides) & fitted, key=lambda position: strides[position])
    least, greatest = ((1 / strides[position], runs[position].measured_s) for position in ends)
    slope = (least[1] - greatest[1]) / (least[0] - greatest[0])
    return {
        position: greatest[1] + slope * (1 / stride - greatest[0])
        for position, stride in strides.items()
        if position not in fitted
    }
