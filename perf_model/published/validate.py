"""Which runs the rates are fitted on, what they predict of the others, and by how much that is wrong."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from perf_model.published.fit import Fit, fit_rates
from perf_model.published.runs import Run

LINE_STRIDES = 4
"""A line through two strides says something where there are at least two others."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """``line_s``: what a straight line in 1/stride says, the baseline; None where it cannot apply, or was fitted."""

    run: Run
    predicted_s: float
    fitted: bool
    line_s: float | None

    @property
    def error(self) -> float:
        return self.predicted_s / self.run.measured_s - 1

    def to_json_dict(self) -> dict[str, object]:
        return {
            "sweep": self.run.sweep,
            "model_name": self.run.model_name,
            "update_stride": self.run.setting.update_stride,
            "measured_s": self.run.measured_s,
            "predicted_s": self.predicted_s,
            "fitted": self.fitted,
        }


@dataclass(frozen=True, kw_only=True)
class Group:
    """Runs that share rates. ``positions`` are those of its runs in the file."""

    name: str
    tp: int
    dp: int
    fit: Fit
    positions: tuple[int, ...]


class Errors(NamedTuple):
    """Of absolute relative errors."""

    runs: int
    median: float
    p90: float

    @classmethod
    def of(cls, errors: Iterable[float]) -> Errors | None:
        """None where there are none."""
        absolute = np.abs(list(errors))
        if not len(absolute):
            return None
        return cls(len(absolute), float(np.median(absolute)), float(np.percentile(absolute, 90)))


@dataclass(frozen=True, kw_only=True)
class Validation:
    """``predictions`` of all runs, those that were fitted too, in the order of the file."""

    groups: tuple[Group, ...]
    predictions: tuple[Prediction, ...]

    @property
    def errors(self) -> Errors | None:
        """Of the predicted runs; None where all were fitted."""
        return Errors.of(each.error for each in self.predictions if not each.fitted)

    @property
    def beside_line(self) -> tuple[Errors, Errors] | None:
        """The model's and the line's, of the same runs: those to which the line applies. None where it never does."""
        both = [each for each in self.predictions if each.line_s is not None]
        ours = Errors.of(each.error for each in both)
        line = Errors.of(each.line_s / each.run.measured_s - 1 for each in both if each.line_s is not None)
        return None if ours is None or line is None else (ours, line)

    def to_json_dict(self) -> dict[str, object]:
        errors = self.errors
        return {
            "runs": [each.to_json_dict() for each in self.predictions],
            "median_abs_rel_error": None if errors is None else errors.median,
            "p90_abs_rel_error": None if errors is None else errors.p90,
        }


def validate(runs: Sequence[Run], across_models: bool) -> Validation:
    """Fits a few runs of each group and predicts all.

    A group is a sweep's runs of one tp and dp; its runs without interleaving are fitted, and those with the least and
    the greatest stride. ``across_models``: a machine's, over all sweeps; its smaller models, half of them rounded up,
    are fitted.
    """
    members: dict[tuple[str, int, int], list[int]] = defaultdict(list)
    for position, run in enumerate(runs):
        members[run.machine if across_models else run.sweep, run.tp, run.dp].append(position)
    groups = []
    predictions: dict[int, Prediction] = {}
    for (name, tp, dp), positions in members.items():
        its = {position: runs[position] for position in positions}
        fitted = _smaller_models(its) if across_models else _outermost_strides(its)
        fit = fit_rates([its[position] for position in sorted(fitted)])
        line = {} if across_models else _line(its, fitted)
        groups.append(Group(name=name, tp=tp, dp=dp, fit=fit, positions=tuple(positions)))
        predicted_s = {setting: fit.rates.update_s(setting) for setting in {run.setting for run in its.values()}}
        for position, run in its.items():
            predictions[position] = Prediction(
                run=run,
                predicted_s=predicted_s[run.setting],
                fitted=position in fitted,
                line_s=line.get(position),
            )
    return Validation(groups=tuple(groups), predictions=tuple(predictions[position] for position in range(len(runs))))


def _outermost_strides(runs: Mapping[int, Run]) -> set[int]:
    """Of interleaved runs the first with the least stride and the last with the greatest; all others."""
    strides = _strides(runs)
    fitted = set(runs) - set(strides)
    if strides:
        fitted |= {min(strides, key=lambda its: (strides[its], its)), max(strides, key=lambda its: (strides[its], its))}
    return fitted


def _smaller_models(runs: Mapping[int, Run]) -> set[int]:
    models = sorted({_model(run) for run in runs.values()})
    smaller = models[: (len(models) + 1) // 2]
    return {position for position, run in runs.items() if _model(run) in smaller}


def _model(run: Run) -> tuple[int, str]:
    return run.setting.real_params, run.model_name


def _strides(runs: Mapping[int, Run]) -> dict[int, int]:
    """Of the interleaved runs."""
    pairs = ((position, run.setting.update_stride) for position, run in runs.items())
    return {position: stride for position, stride in pairs if stride is not None}


def _line(runs: Mapping[int, Run], fitted: set[int]) -> dict[int, float]:
    """Seconds of the runs not fitted, by the straight line in 1/stride through the two interleaved ones that are."""
    strides = _strides(runs)
    alike = {replace(runs[position].setting, update_stride=None) for position in strides}
    if len(set(strides.values())) < LINE_STRIDES or len(alike) > 1:
        return {}
    ends = sorted(set(strides) & fitted, key=lambda position: strides[position])
    least, greatest = ((1 / strides[position], runs[position].measured_s) for position in ends)
    slope = (least[1] - greatest[1]) / (least[0] - greatest[0])
    return {
        position: greatest[1] + slope * (1 / stride - greatest[0])
        for position, stride in strides.items()
        if position not in fitted
    }
