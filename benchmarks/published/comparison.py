"""Fit rates on some settings of the published runs, predict the others, and compare with simple baselines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.published.least_squares import FittedRates
from benchmarks.published.phases import fit_phases, hiding_backward_s, phases_of
from benchmarks.published.runs import QUANTITIES, MeasuredRun
from benchmarks.published.updates import (
    fit_updates,
    link_bytes_per_s,
    simulated_update_s,
    update_s,
    updated_parameters,
)

Runs = Mapping[int, MeasuredRun]
"""Runs by their position in the file."""

MODEL = "the model"
LINE, PER_PARAMETER, RULES_OF_PLAN = "a line in 1/stride", "seconds per parameter", "the rules of plan"
"""The model is compared with them: two baselines, and the rules of ``plan`` at the same rates."""

LINE_STRIDES = 3
"""The least number of strides for the line: it goes through two strides, and is compared at those in between."""


@dataclass(frozen=True, kw_only=True)
class SettingSplit:
    """A way to group runs with common rates, and to divide the settings of a group into fitted and predicted ones.

    The runs with the smaller half of the values of ``halved``, rounded up, are fitted. If it is None, the groups are
    sweeps: the settings that are not interleaved or have the outermost strides are fitted.
    """

    name: str
    key: Callable[[MeasuredRun], tuple[object, ...]]
    halved: Callable[[MeasuredRun], int] | None

    def fitted_in(self, runs: Runs) -> set[int]:
        """Return the positions of the runs of one group whose settings are fitted."""
        if self.halved is not None:
            values = sorted({self.halved(run) for run in runs.values()})
            smaller = values[: (len(values) + 1) // 2]
            return {position for position, run in runs.items() if self.halved(run) in smaller}
        strides = strides_of(runs)
        ordered = sorted(strides, key=lambda position: (strides[position], position))
        return (set(runs) - set(strides)) | set(ordered[:1] + ordered[-1:])


STRIDES = SettingSplit(name="other strides", key=lambda run: (run.machine, run.sweep, run.setting.ranks), halved=None)
MODELS = SettingSplit(
    name="larger models", key=lambda run: (run.machine, run.setting.ranks), halved=lambda run: run.setting.real_params
)
NODES = SettingSplit(name="more nodes", key=lambda run: (run.machine, run.ranks_on_node), halved=lambda run: run.nodes)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The prediction of one run; ``fitted``: the rates were fitted to its setting.

    ``seconds`` holds each quantity's time by ``MODEL``, and by the others where they apply.
    """

    run: MeasuredRun
    fitted: bool
    seconds: Mapping[str, Mapping[str, float]]

    def error(self, quantity: str, name: str = MODEL) -> float:
        """Return the relative error of the seconds by ``name``, positive if they are too long."""
        return self.seconds[name][quantity] / self.run.measured_s[quantity] - 1


@dataclass(frozen=True, kw_only=True)
class RunComparison:
    """The rates of each group of a split, and the predictions of all runs, also of the fitted ones, in their order.

    ``around_line`` are relative differences of the updates of predicted strides from a line that is fitted to all
    strides of their sweep.
    """

    rates: Mapping[tuple[object, ...], FittedRates]
    predictions: tuple[Prediction, ...]
    around_line: list[float]

    @property
    def not_fitted(self) -> list[Prediction]:
        """Return the predictions of the runs whose settings were not fitted."""
        return [found for found in self.predictions if not found.fitted]

    def errors_of(self, quantity: str, name: str = MODEL, *, where: str = MODEL) -> list[float]:
        """Return the absolute errors by ``name`` of the runs that were not fitted, and to which ``where`` applies."""
        both = name, where
        found = [found for found in self.not_fitted if all(quantity in found.seconds.get(each, {}) for each in both)]
        return [abs(prediction.error(quantity, name)) for prediction in found]


def compare(runs: Sequence[MeasuredRun], split: SettingSplit) -> RunComparison:
    """Fit the settings of each group that ``split`` names, and predict all runs.

    All runs of a fitted setting are fitted, whatever their sweeps are: two runs with equal settings on one machine
    should take equally long.
    """
    members: dict[tuple[object, ...], dict[int, MeasuredRun]] = defaultdict(dict)
    for position, run in enumerate(runs):
        members[split.key(run)][position] = run
    settings = {group[position].trained for group in members.values() for position in split.fitted_in(group)}
    fitted = {position: run for position, run in enumerate(runs) if run.trained in settings}
    seconds: list[dict[str, dict[str, float]]] = [{} for _ in runs]
    known_of = {
        key: {position: run for position, run in group.items() if position in fitted} for key, group in members.items()
    }
    phases_of_group = _fit_phases_of_groups(known_of)
    rates, around_line = {}, []
    for key, group in members.items():
        known, phases = known_of[key], phases_of_group.get(key)
        updates = rates[key] = fit_updates(list(known.values()))
        if phases is not None:
            rates[key] = FittedRates(
                values={**updates.values, **phases.values}, determined=updates.determined + phases.determined
            )
        networks = [rate for other, each in phases_of_group.items() if other[0] == key[0] for rate in _network_of(each)]
        for position, run in group.items():
            has_phases = phases is not None and run.blocking is not None and (run.nodes == 1 or bool(networks))
            seconds[position] |= _predicted(run, rates[key].values, has_phases=has_phases)
        if split is STRIDES:
            for quantity in QUANTITIES:
                for position, found_s in on_line(quantity, group, known).items():
                    seconds[position].setdefault(LINE, {})[quantity] = found_s
            around_line += [
                found_s / runs[position].measured_s["update"] - 1
                for position, found_s in on_line("update", group, group).items()
                if position not in fitted
            ]
    for quantity in QUANTITIES:
        for position, found_s in per_parameter(quantity, runs, fitted, any_nodes=split is NODES).items():
            seconds[position].setdefault(PER_PARAMETER, {})[quantity] = found_s
    return RunComparison(
        rates=rates,
        predictions=tuple(
            Prediction(run=run, fitted=position in fitted, seconds=seconds[position])
            for position, run in enumerate(runs)
        ),
        around_line=around_line,
    )


def _fit_phases_of_groups(known_of: Mapping[tuple[object, ...], Runs]) -> dict[tuple[object, ...], FittedRates]:
    """Return the rates of phases of each group, with one network rate per machine, the first member of the keys.

    Runs of which it is unknown whether gradients block are left out, and so are groups without others.
    """
    runs_of = {key: [run for run in known.values() if run.blocking is not None] for key, known in known_of.items()}
    found = {key: fit_phases(runs) for key, runs in runs_of.items() if runs}
    networks: dict[object, list[float]] = defaultdict(list)
    for (machine, *_), phases in found.items():
        networks[machine] += _network_of(phases)
    for key, phases in found.items():
        if rates := networks[key[0]]:
            again = fit_phases(runs_of[key], float(np.exp(np.mean(np.log(rates)))))
            found[key] = replace(phases, values=again.values)
    return found


def _network_of(phases: FittedRates) -> list[float]:
    """Return the network's rate, if the runs determine it."""
    name = "inter_node_bytes_per_s"
    return [phases.values[name]] if name in phases.determined else []


def _predicted(run: MeasuredRun, rates: Mapping[str, float], *, has_phases: bool) -> dict[str, dict[str, float]]:
    simulated_s = simulated_update_s(run.setting, rates, run.machine)
    updated_s = update_s(run.setting, rates, link_bytes_per_s(run.machine))
    if not has_phases:
        return {MODEL: {"update": updated_s}, RULES_OF_PLAN: {"update": simulated_s}}
    forward_s, backward_s, rest_s = phases_of(run, rates)

    def of_phases(backward_s: float, updated_s: float) -> dict[str, float]:
        iteration_s = forward_s + backward_s + updated_s + rest_s
        return {"backward": backward_s, "update": updated_s, "iteration": iteration_s}

    # Today's DeepSpeed, which plan predicts, never blocks for the gradients.
    by_plan = {"update": simulated_s} if run.blocking else of_phases(hiding_backward_s(run, rates), simulated_s)
    return {MODEL: {"forward": forward_s, **of_phases(backward_s, updated_s)}, RULES_OF_PLAN: by_plan}


def strides_of(runs: Runs) -> dict[int, int]:
    """Return the strides of the interleaved runs, by position."""
    pairs = ((position, run.setting.update_stride) for position, run in runs.items())
    return {position: stride for position, stride in pairs if stride is not None}


def on_line(quantity: str, runs: Runs, known: Runs) -> dict[int, float]:
    """Return the seconds of each interleaved run on the line in 1/stride through the interleaved runs of ``known``.

    Return nothing if the interleaved runs differ in more than the stride, have fewer than ``LINE_STRIDES`` strides, or
    fewer than two in ``known``.
    """
    strides = strides_of(runs)
    alike = {
        (replace(run.setting, update_stride=None), run.micro_batch, run.accumulation)
        for position, run in runs.items()
        if position in strides
    }
    through = sorted(strides.keys() & known.keys())
    inverses = [1 / strides[position] for position in through]
    if len(set(strides.values())) < LINE_STRIDES or len(alike) > 1 or len(set(inverses)) < 2:
        return {}
    slope, constant = np.polyfit(inverses, [known[position].measured_s[quantity] for position in through], deg=1)
    return {position: float(constant + slope / stride) for position, stride in strides.items()}


def per_parameter(quantity: str, runs: Sequence[MeasuredRun], fitted: Runs, *, any_nodes: bool) -> dict[int, float]:
    """Return the seconds of each run that is not fitted, by the seconds per parameter of fitted runs like it.

    They may be of other sweeps and models. For the update, runs of one machine, number of ranks and stride are alike,
    and the parameters are the offloaded ones of a rank. For the rest, the batch and the offloaded share must also be
    equal, and the parameters are the model's. With ``any_nodes``, only the ranks per node must be equal.
    """

    def alike(run: MeasuredRun) -> Hashable:
        ranks = (run.machine, run.ranks_on_node if any_nodes else run.setting.ranks, run.setting.update_stride)
        batch = (run.setting.cpu_ratio, run.micro_batch, run.accumulation, run.blocking)
        return ranks if quantity == "update" else (*ranks, *batch)

    def numel(run: MeasuredRun) -> int:
        updated = updated_parameters(run.setting)
        return updated.on_cpu + updated.streamed if quantity == "update" else run.setting.real_params

    rates: dict[Hashable, list[float]] = defaultdict(list)
    for run in fitted.values():
        rates[alike(run)].append(run.measured_s[quantity] / numel(run))
    return {
        position: float(np.mean(rates[alike(run)])) * numel(run)
        for position, run in enumerate(runs)
        if position not in fitted and alike(run) in rates
    }


def repeated_differences(runs: Sequence[MeasuredRun]) -> list[float]:
    """Return the relative differences of interleaved updates from the median of their setting, if measured again."""
    settings: dict[Hashable, list[float]] = defaultdict(list)
    for run in runs:
        if run.setting.update_stride is not None:
            settings[run.trained].append(run.measured_s["update"])
    repeats = [repeats for repeats in settings.values() if len(repeats) > 1]
    return [measured_s / float(np.median(of_setting)) - 1 for of_setting in repeats for measured_s in of_setting]
