"""Define ``Prediction``, the predicted times of one run with its errors, and ``PredictedRuns``, their summary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from perf_model.published.errors import QUANTITIES, ErrorSummary, measured_s_of
from perf_model.published.phase_rates import PhaseSeconds
from perf_model.published.runs import MeasuredRun

PHASES = ("forward", "backward", "iteration")
"""The quantities that JSON has besides the update, whose names have no prefix."""

BASELINES = ("line_s", "per_parameter_s")
"""The fields of the two simple baselines."""

COMPARED = (*BASELINES, "planned_s")
"""The fields of all times that the predicted ones are compared with."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The prediction of one run.

    ``fitted``: its setting was among those that the rates were fitted on. ``line_s`` and ``per_parameter_s`` are the
    times that the two baselines predict of each quantity; one is missing where a baseline does not apply or the run was
    fitted. ``planned_s`` are the times by the rules of ``plan``, at the same rates, where these rules differ.
    ``phases`` is None if the file lacks the batch of the run, or the seconds of the phases of all fitted runs.
    """

    run: MeasuredRun
    predicted_s: float
    fitted: bool
    line_s: Mapping[str, float]
    per_parameter_s: Mapping[str, float]
    planned_s: Mapping[str, float]
    phases: PhaseSeconds | None

    @property
    def error(self) -> float:
        """Return the relative error of the update, positive if the prediction is too long."""
        return self.predicted_s / self.run.measured_s - 1

    @property
    def iteration_s(self) -> float | None:
        """Return the predicted seconds of the iteration, or None without phases."""
        return None if self.phases is None else self.phases.iteration_s(self.predicted_s)

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

    def other_errors(self, field: str) -> dict[str, float]:
        """Return the relative errors of ``line_s``, ``per_parameter_s`` or ``planned_s``, where it applies."""
        return self._errors_of(getattr(self, field))

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
            "nodes": self.run.nodes,
            "update_stride": self.run.setting.update_stride,
            "measured_s": self.run.measured_s,
            "predicted_s": self.predicted_s,
            "fitted": self.fitted,
            "line_s": self.line_s.get("update"),
            "per_parameter_s": self.per_parameter_s.get("update"),
            "planned_s": self.planned_s.get("update"),
            **{key: found_s for name in PHASES for key, found_s in self._phase_to_json(name).items()},
        }

    def _phase_to_json(self, name: str) -> dict[str, float | None]:
        return {
            f"{name}_measured_s": measured_s_of(self.run, name),
            f"{name}_predicted_s": self.seconds()[name],
            f"{name}_line_s": self.line_s.get(name),
            f"{name}_per_parameter_s": self.per_parameter_s.get(name),
            f"{name}_planned_s": self.planned_s.get(name),
        }


@dataclass(frozen=True, kw_only=True)
class PredictedRuns:
    """Predictions whose errors are summarized together."""

    predictions: tuple[Prediction, ...]

    def errors_of(self, quantity: str) -> ErrorSummary | None:
        """Return the errors of ``quantity``, or None if no run has it."""
        errors = [prediction.errors() for prediction in self.predictions]
        return ErrorSummary.from_errors(error[quantity] for error in errors if quantity in error)

    def compared_with(self, field: str, quantity: str = "update") -> tuple[ErrorSummary, ErrorSummary] | None:
        """Return the errors of the predictions and of ``field``, one of ``COMPARED``, where both have the quantity."""
        pairs = [(found.errors(), found.other_errors(field)) for found in self.predictions]
        both = [(model[quantity], other[quantity]) for model, other in pairs if quantity in model and quantity in other]
        of_model = ErrorSummary.from_errors(error for error, _ in both)
        of_field = ErrorSummary.from_errors(error for _, error in both)
        return None if of_model is None or of_field is None else (of_model, of_field)

    def to_json_dict(self) -> dict[str, object]:
        """Return the errors of each quantity, and of what it is compared with, as they are written to JSON."""
        return {quantity: self._quantity_to_json(quantity) for quantity in QUANTITIES}

    def _quantity_to_json(self, quantity: str) -> dict[str, object] | None:
        errors = self.errors_of(quantity)
        if errors is None:
            return None
        found: dict[str, object] = errors._asdict()
        for field in COMPARED:
            compared = self.compared_with(field, quantity)
            found[field] = None if compared is None else {**compared[1]._asdict(), "model": compared[0]._asdict()}
        return found
