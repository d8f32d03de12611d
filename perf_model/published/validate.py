"""Fit rates on the settings that a split names, predict the other settings, and compute the errors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from perf_model.published.baselines import on_line, per_parameter
from perf_model.published.errors import QUANTITIES
from perf_model.published.least_squares import FittedRates
from perf_model.published.measurement_spread import MeasurementSpread
from perf_model.published.phase_rates import fit_phases, phases_of
from perf_model.published.predicted_run import PredictedRuns, Prediction
from perf_model.published.rules_of_plan import backward_s, simulated_update_s
from perf_model.published.runs import MeasuredRun
from perf_model.published.splits import NODES, GroupKey, SettingSplit
from perf_model.published.update_rates import fit_updates, link_bytes_per_s, machine_of, preset_of, update_s


@dataclass(frozen=True, kw_only=True)
class RunGroup:
    """Runs that share rates.

    ``positions`` are their positions in the file, and ``settings`` is the number of different settings that the rates
    were fitted on. ``phases`` is None if no fitted run has phases.
    """

    key: GroupKey
    updates: FittedRates
    phases: FittedRates | None
    settings: int
    positions: tuple[int, ...]

    def to_json_dict(self) -> dict[str, object]:
        """Return the rates as they are written to JSON, with the names of those that the runs determine."""
        fits = [fit for fit in (self.updates, self.phases) if fit is not None]
        key = self.key
        return {
            "name": key.sweep or key.machine,
            "machine": key.machine,
            "preset": machine_of(key.machine).name,
            "preset_assumed": preset_of(key.machine) is None,
            "tp": key.tp,
            "dp": key.dp,
            "ranks_on_node": key.ranks_on_node,
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
    def not_fitted(self) -> PredictedRuns:
        """Return the predictions of the runs whose settings were not fitted."""
        return PredictedRuns(predictions=tuple(found for found in self.predictions if not found.fitted))

    def by_machine(self) -> dict[tuple[str, str, int], PredictedRuns]:
        """Return the runs that were not fitted, by machine, model and number of nodes."""
        groups: dict[tuple[str, str, int], list[Prediction]] = defaultdict(list)
        for found in self.not_fitted.predictions:
            groups[found.run.machine, found.run.model_name, found.run.nodes].append(found)
        return {key: PredictedRuns(predictions=tuple(found)) for key, found in sorted(groups.items())}

    def to_json_dict(self) -> dict[str, object]:
        """Return the validation as it is written to JSON."""
        errors, iterations = (self.not_fitted.errors_of(quantity) for quantity in ("update", "iteration"))
        return {
            "rule": self.rule,
            "groups": [group.to_json_dict() for group in self.groups],
            "runs": [prediction.to_json_dict() for prediction in self.predictions],
            "median_abs_rel_error": None if errors is None else errors.median,
            "p90_abs_rel_error": None if errors is None else errors.p90,
            "iteration_median_abs_rel_error": None if iterations is None else iterations.median,
            "iteration_p90_abs_rel_error": None if iterations is None else iterations.p90,
            "errors": self.not_fitted.to_json_dict(),
            "errors_by_machine": [
                {"machine": machine, "model_name": model, "nodes": nodes, **found.to_json_dict()}
                for (machine, model, nodes), found in self.by_machine().items()
            ],
            "spread": self.spread.to_json_dict(),
        }


def validate(runs: Sequence[MeasuredRun], split: SettingSplit) -> Validation:
    """Fit the settings of each group that ``split`` names, and predict all runs.

    All runs of a fitted setting are fitted: two runs with equal settings should take equally long. Runs whose last
    gradients block differ only in backward, and count as one setting.
    """
    members = split.groups(runs)
    fitted_runs = split.fitted(members)
    groups = []
    predictions: dict[int, Prediction] = {}
    for key, group in members.items():
        known = {position: run for position, run in group.items() if position in fitted_runs}
        updates, phases = fit_updates(list(known.values())), fit_phases(list(known.values()))
        lines = {name: on_line(name, group, known) for name in QUANTITIES} if split.has_lines else {}
        link = link_bytes_per_s(key.machine)
        simulated = {
            setting: simulated_update_s(setting, updates.values, key.machine)
            for setting in {run.setting for run in group.values()}
        }
        for position, run in group.items():
            batch, update = run.batch, update_s(run.setting, updates.values, link)
            found = None if phases is None or batch is None else phases_of(run, batch, phases.values)
            planned_s = {"update": simulated[run.setting]}
            # Today's DeepSpeed, which plan predicts, never blocks for the gradients.
            if found is not None and phases is not None and batch is not None and not batch.blocking:
                planned_s["backward"] = backward_s(run, batch, phases.values)
                with_plan = replace(found, backward_s=planned_s["backward"])
                planned_s["iteration"] = with_plan.iteration_s(planned_s["update"])
            predictions[position] = Prediction(
                run=run,
                predicted_s=update,
                fitted=position in known,
                line_s={} if position in known else _at(position, lines),
                per_parameter_s={},
                planned_s=planned_s,
                phases=found,
            )
        settings = len({run.trained for run in known.values()})
        groups.append(RunGroup(key=key, updates=updates, phases=phases, settings=settings, positions=tuple(group)))
    rates = {name: per_parameter(name, runs, fitted_runs, any_nodes=split is NODES) for name in QUANTITIES}
    return Validation(
        rule=split.rule,
        groups=tuple(groups),
        predictions=tuple(
            replace(predictions[position], per_parameter_s=_at(position, rates)) for position in range(len(runs))
        ),
        spread=MeasurementSpread.from_runs(runs, members.values(), set(range(len(runs))) - set(fitted_runs)),
    )


def _at(position: int, seconds: Mapping[str, Mapping[int, float]]) -> dict[str, float]:
    """Return the seconds of each quantity at one position, as far as there are any."""
    return {name: found[position] for name, found in seconds.items() if position in found}
