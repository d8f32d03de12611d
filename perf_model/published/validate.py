"""Choose the settings that rates are fitted on, predict the other settings, and compute the errors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from perf_model.published.baselines import on_line, per_parameter, strides_of
from perf_model.published.errors import QUANTITIES, ErrorSummary, measured_s_of
from perf_model.published.least_squares import FittedRates
from perf_model.published.measurement_spread import MeasurementSpread
from perf_model.published.phase_rates import PhaseSeconds, fit_phases, phases_of
from perf_model.published.runs import MeasuredRun
from perf_model.published.update_rates import fit_updates, link_bytes_per_s, machine_of, preset_of, update_s

PHASES = ("forward", "backward", "iteration")
"""The quantities that JSON has besides the update, whose names have no prefix."""

STRIDES_RULE = (
    "In each sweep, the settings that are not interleaved and those of the least and the greatest stride are fitted, "
    "and the settings in between are predicted. A setting includes micro-batch and accumulation."
)
MODELS_RULE = "Of each machine, the smaller half of the models, rounded up, is fitted, and the larger ones predicted."


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The prediction of one run.

    ``fitted``: its setting was among those that the rates were fitted on. ``line_s`` and ``per_parameter_s`` are the
    times that the two baselines predict of each quantity; one is missing where a baseline does not apply or the run was
    fitted. ``phases`` is None if the file lacks the batch of the run, or the seconds of the phases of all fitted runs.
    """

    run: MeasuredRun
    predicted_s: float
    fitted: bool
    line_s: Mapping[str, float]
    per_parameter_s: Mapping[str, float]
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

    def seconds(self) -> dict[str, float | None]:
        """Return the predicted seconds of each quantity."""
        return {
            "forward": None if self.phases is None else self.phases.forward_s,
            "backward": None if self.phases is None else self.phases.backward_s,
            "update": self.predicted_s,
            "iteration": self.iteration_s,
        }

    def errors(self) -> dict[str, float]:
        """Return the relative errors of the predicted quantities, as far as they were measured."""
        return self._errors_of(self.seconds())

    def baseline_errors(self, baseline: str) -> dict[str, float]:
        """Return the relative errors of ``line_s`` or ``per_parameter_s``, where the baseline applies."""
        return self._errors_of(getattr(self, baseline))

    def _errors_of(self, seconds: Mapping[str, float | None]) -> dict[str, float]:
        pairs = ((name, found_s, measured_s_of(self.run, name)) for name, found_s in seconds.items())
        return {
            name: found_s / measured_s - 1
            for name, found_s, measured_s in pairs
            if found_s is not None and measured_s is not None
        }

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
            "line_s": self.line_s.get("update"),
            "per_parameter_s": self.per_parameter_s.get("update"),
            **{key: found_s for name in PHASES for key, found_s in self._phase_to_json(name).items()},
        }

    def _phase_to_json(self, name: str) -> dict[str, float | None]:
        return {
            f"{name}_measured_s": measured_s_of(self.run, name),
            f"{name}_predicted_s": self.seconds()[name],
            f"{name}_line_s": self.line_s.get(name),
            f"{name}_per_parameter_s": self.per_parameter_s.get(name),
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


@dataclass(frozen=True, kw_only=True)
class Validation:
    """The groups, and the predictions of all runs, also of the fitted ones, in the order of the file.

    ``spread`` is the spread of the measurements themselves.
    """

    rule: str
    groups: tuple[RunGroup, ...]
    predictions: tuple[Prediction, ...]
    spread: MeasurementSpread

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

    def compared_with(self, baseline: str, quantity: str = "update") -> tuple[ErrorSummary, ErrorSummary] | None:
        """Return the errors of the model and of ``line_s`` or ``per_parameter_s``, where both apply."""
        pairs = [(found.errors(), found.baseline_errors(baseline)) for found in self.not_fitted]
        both = [(ours[quantity], theirs[quantity]) for ours, theirs in pairs if quantity in ours and quantity in theirs]
        ours = ErrorSummary.from_errors(error for error, _ in both)
        theirs = ErrorSummary.from_errors(error for _, error in both)
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
            "spread": self.spread.to_json_dict(),
        }


def validate(runs: Sequence[MeasuredRun], across_models: bool) -> Validation:
    """Fit a few settings of each group, and predict all runs.

    A group is the runs of one sweep with one tp and dp, or, with ``across_models``, those of one machine over all
    sweeps. ``STRIDES_RULE`` and ``MODELS_RULE`` say which of its settings are fitted. All runs of a fitted setting are
    fitted: two runs with equal settings should take equally long. Runs whose last gradients block differ only in
    backward, and count as one setting.
    """
    members: dict[tuple[str, str, int, int], list[int]] = defaultdict(list)
    for position, run in enumerate(runs):
        members[run.machine, "" if across_models else run.sweep, run.tp, run.dp].append(position)
    groups = []
    predictions: dict[int, Prediction] = {}
    fitted_runs: dict[int, MeasuredRun] = {}
    sweeps = [{position: runs[position] for position in positions} for positions in members.values()]
    for (machine, sweep, tp, dp), group in zip(members, sweeps, strict=True):
        fitted = _smaller_models(group) if across_models else _outermost_strides(group)
        settings = {group[position].trained for position in fitted}
        known = {position: run for position, run in group.items() if run.trained in settings}
        updates, phases = fit_updates(list(known.values())), fit_phases(list(known.values()))
        lines = {} if across_models else {name: on_line(name, group, known) for name in QUANTITIES}
        fitted_runs |= known
        link = link_bytes_per_s(machine)
        for position, run in group.items():
            batch = run.batch
            predictions[position] = Prediction(
                run=run,
                predicted_s=update_s(run.setting, updates.values, link),
                fitted=position in known,
                line_s={} if position in known else _at(position, lines),
                per_parameter_s={},
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
                positions=tuple(group),
            )
        )
    rates = {name: per_parameter(name, runs, fitted_runs) for name in QUANTITIES}
    return Validation(
        rule=MODELS_RULE if across_models else STRIDES_RULE,
        groups=tuple(groups),
        predictions=tuple(
            replace(predictions[position], per_parameter_s=_at(position, rates)) for position in range(len(runs))
        ),
        spread=MeasurementSpread.from_runs(runs, sweeps, set(range(len(runs))) - set(fitted_runs)),
    )


def _at(position: int, seconds: Mapping[str, Mapping[int, float]]) -> dict[str, float]:
    """Return the seconds of each quantity at one position, as far as there are any."""
    return {name: found[position] for name, found in seconds.items() if position in found}


def _outermost_strides(runs: Mapping[int, MeasuredRun]) -> set[int]:
    """Return the runs to fit: those that are not interleaved, one of the least and one of the greatest stride.

    Of several runs, the first one of the least stride and the last one of the greatest stride is fitted.
    """
    strides = strides_of(runs)
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
