"""Choose the settings that rates are fitted on, predict the other settings, and compute the errors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from perf_model.published.least_squares import FittedRates
from perf_model.published.phase_rates import PhaseSeconds, fit_phases, phases_of
from perf_model.published.placements import updated_parameters
from perf_model.published.runs import MeasuredRun
from perf_model.published.update_rates import fit_updates, link_bytes_per_s, machine_of, preset_of, update_s

LINE_STRIDES = 3
"""The least number of strides for the line: it goes through two strides, and is compared at those in between."""

STRIDES_RULE = (
    "In each sweep, the settings that are not interleaved and those of the least and the greatest stride are fitted, "
    "and the settings in between are predicted."
)
MODELS_RULE = "Of each machine, the smaller half of the models, rounded up, is fitted, and the larger ones predicted."


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The prediction of one run.

    ``fitted``: its setting was among those that the rates were fitted on. ``line_s`` and ``per_parameter_s`` are the
    updates that the two baselines predict, None where one does not apply or the run was fitted. ``phases`` is None if
    the file lacks the batch of the run, or the seconds of the phases of all fitted runs.
    """

    run: MeasuredRun
    predicted_s: float
    fitted: bool
    line_s: float | None
    per_parameter_s: float | None
    phases: PhaseSeconds | None

    @property
    def error(self) -> float:
        """Return the relative error of the update, positive if the prediction is too long."""
        return self.predicted_s / self.run.measured_s - 1

    @property
    def iteration_s(self) -> float | None:
        """Return the predicted seconds of the iteration, or None without phases."""
        if self.phases is None:
            return None
        return self.phases.forward_s + self.phases.backward_s + self.predicted_s + self.phases.rest_s

    def errors(self) -> dict[str, float]:
        """Return the relative errors of forward, backward, update and iteration, as far as they were measured."""
        errors = {"update": self.error}
        if self.phases is not None:
            pairs = {
                "forward": (self.phases.forward_s, self.run.forward_s),
                "backward": (self.phases.backward_s, self.run.backward_s),
                "iteration": (self.iteration_s, self.run.iteration_s),
            }
            errors |= {
                name: predicted_s / measured_s - 1
                for name, (predicted_s, measured_s) in pairs.items()
                if predicted_s is not None and measured_s is not None
            }
        return errors

    def to_json_dict(self) -> dict[str, object]:
        """Return the prediction as it is written to JSON."""
        return {
            "machine": self.run.machine,
            "sweep": self.run.sweep,
            "model_name": self.run.model_name,
            "tp": self.run.tp,
            "dp": self.run.dp,
            "update_stride": self.run.setting.update_stride,
            "measured_s": self.run.measured_s,
            "predicted_s": self.predicted_s,
            "fitted": self.fitted,
            "line_s": self.line_s,
            "per_parameter_s": self.per_parameter_s,
            "forward_measured_s": self.run.forward_s,
            "forward_predicted_s": None if self.phases is None else self.phases.forward_s,
            "backward_measured_s": self.run.backward_s,
            "backward_predicted_s": None if self.phases is None else self.phases.backward_s,
            "iteration_measured_s": self.run.iteration_s,
            "iteration_predicted_s": self.iteration_s,
        }


@dataclass(frozen=True, kw_only=True)
class RunGroup:
    """Runs that share rates.

    ``positions`` are their positions in the file, and ``settings`` is the number of different settings that the rates
    were fitted on. ``phases`` is None if no fitted run has phases.
    """

    name: str
    machine: str
    tp: int
    dp: int
    updates: FittedRates
    phases: FittedRates | None
    settings: int
    positions: tuple[int, ...]

    def to_json_dict(self) -> dict[str, object]:
        """Return the rates as they are written to JSON, with the names of those that the runs determine."""
        fits = [fit for fit in (self.updates, self.phases) if fit is not None]
        return {
            "name": self.name,
            "machine": self.machine,
            "preset": machine_of(self.machine).name,
            "preset_assumed": preset_of(self.machine) is None,
            "tp": self.tp,
            "dp": self.dp,
            "fitted_settings": self.settings,
            "rates": {name: value for fit in fits for name, value in fit.values.items()},
            "determined": [name for fit in fits for name in fit.determined],
        }


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

    rule: str
    groups: tuple[RunGroup, ...]
    predictions: tuple[Prediction, ...]

    @property
    def not_fitted(self) -> tuple[Prediction, ...]:
        """Return the predictions of the runs whose settings were not fitted."""
        return tuple(prediction for prediction in self.predictions if not prediction.fitted)

    def errors_of(self, quantity: str) -> ErrorSummary | None:
        """Return the errors of ``quantity`` over the runs that were not fitted, or None if there are none."""
        errors = [prediction.errors() for prediction in self.not_fitted]
        return ErrorSummary.from_errors(error[quantity] for error in errors if quantity in error)

    @property
    def errors(self) -> ErrorSummary | None:
        """Return the errors of the updates that were not fitted, or None if all were fitted."""
        return self.errors_of("update")

    def compared_with(self, baseline: str) -> tuple[ErrorSummary, ErrorSummary] | None:
        """Return the errors of the model and of ``line_s`` or ``per_parameter_s``, where the baseline applies."""
        seconds = [(prediction, getattr(prediction, baseline)) for prediction in self.predictions]
        both = [(prediction, found_s) for prediction, found_s in seconds if found_s is not None]
        ours = ErrorSummary.from_errors(prediction.error for prediction, _ in both)
        theirs = ErrorSummary.from_errors(found_s / prediction.run.measured_s - 1 for prediction, found_s in both)
        return None if ours is None or theirs is None else (ours, theirs)

    def to_json_dict(self) -> dict[str, object]:
        """Return the validation as it is written to JSON."""
        errors, iterations = self.errors, self.errors_of("iteration")
        return {
            "rule": self.rule,
            "groups": [group.to_json_dict() for group in self.groups],
            "runs": [prediction.to_json_dict() for prediction in self.predictions],
            "median_abs_rel_error": None if errors is None else errors.median,
            "p90_abs_rel_error": None if errors is None else errors.p90,
            "iteration_median_abs_rel_error": None if iterations is None else iterations.median,
            "iteration_p90_abs_rel_error": None if iterations is None else iterations.p90,
        }


def validate(runs: Sequence[MeasuredRun], across_models: bool) -> Validation:
    """Fit a few settings of each group, and predict all runs.

    A group is the runs of one sweep with one tp and dp, or, with ``across_models``, those of one machine over all
    sweeps. ``STRIDES_RULE`` and ``MODELS_RULE`` say which of its settings are fitted. All runs of a fitted setting are
    fitted: two runs with equal settings should take equally long.
    """
    members: dict[tuple[str, str, int, int], list[int]] = defaultdict(list)
    for position, run in enumerate(runs):
        members[run.machine, "" if across_models else run.sweep, run.tp, run.dp].append(position)
    groups = []
    predictions: dict[int, Prediction] = {}
    fitted_runs: dict[int, MeasuredRun] = {}
    for (machine, sweep, tp, dp), positions in members.items():
        group = {position: runs[position] for position in positions}
        fitted = _smaller_models(group) if across_models else _outermost_strides(group)
        settings = {group[position].setting for position in fitted}
        known = {position: run for position, run in group.items() if run.setting in settings}
        updates, phases = fit_updates(list(known.values())), fit_phases(list(known.values()))
        line = {} if across_models else _line(group, known)
        fitted_runs |= known
        link = link_bytes_per_s(machine)
        for position, run in group.items():
            batch = run.batch
            predictions[position] = Prediction(
                run=run,
                predicted_s=update_s(run.setting, updates.values, link),
                fitted=position in known,
                line_s=line.get(position),
                per_parameter_s=None,
                phases=None if phases is None or batch is None else phases_of(run, batch, phases.values),
            )
        groups.append(
            RunGroup(
                name=sweep or machine,
                machine=machine,
                tp=tp,
                dp=dp,
                updates=updates,
                phases=phases,
                settings=len(settings),
                positions=tuple(positions),
            )
        )
    per_parameter = _per_parameter(runs, fitted_runs)
    return Validation(
        rule=MODELS_RULE if across_models else STRIDES_RULE,
        groups=tuple(groups),
        predictions=tuple(
            replace(predictions[position], per_parameter_s=per_parameter.get(position)) for position in range(len(runs))
        ),
    )


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


def _line(runs: Mapping[int, MeasuredRun], known: Mapping[int, MeasuredRun]) -> dict[int, float]:
    """Return the seconds of each run that is not fitted, on the line in 1/stride through the two fitted strides."""
    strides = _strides(runs)
    settings = {replace(runs[position].setting, update_stride=None) for position in strides}
    if len(set(strides.values())) < LINE_STRIDES or len(settings) > 1:
        return {}
    fitted = sorted(set(strides) & set(known))
    slope, constant = np.polyfit(
        [1 / strides[position] for position in fitted], [runs[position].measured_s for position in fitted], deg=1
    )
    return {position: float(constant + slope / stride) for position, stride in strides.items() if position not in known}


def _per_parameter(runs: Sequence[MeasuredRun], fitted: Mapping[int, MeasuredRun]) -> dict[int, float]:
    """Return the seconds of each run that is not fitted, by the seconds per offloaded parameter of fitted runs.

    Only fitted runs of the same machine, ranks and stride count, also those of other sweeps and models.
    """
    rates: dict[tuple[str, int, int, int | None], list[float]] = defaultdict(list)
    for run in fitted.values():
        if (offloaded := _offloaded(run)) > 0:
            rates[_alike(run)].append(run.measured_s / offloaded)
    return {
        position: float(np.mean(rates[_alike(run)])) * _offloaded(run)
        for position, run in enumerate(runs)
        if position not in fitted and _alike(run) in rates and _offloaded(run) > 0
    }


def _alike(run: MeasuredRun) -> tuple[str, int, int, int | None]:
    return run.machine, run.tp, run.dp, run.setting.update_stride


def _offloaded(run: MeasuredRun) -> int:
    numel = updated_parameters(run.setting)
    return numel.on_cpu + numel.streamed
