"""Predict runs by two simple baselines, which a model has to surpass: a straight line and seconds per parameter."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from perf_model.published.errors import QUANTITIES, measured_s_of
from perf_model.published.placements import updated_parameters
from perf_model.published.runs import MeasuredRun

LINE_STRIDES = 3
"""The least number of strides for the line: it goes through two strides, and is compared at those in between."""


def strides_of(runs: Mapping[int, MeasuredRun]) -> dict[int, int]:
    """Return the strides of the interleaved runs, by position."""
    pairs = ((position, run.setting.update_stride) for position, run in runs.items())
    return {position: stride for position, stride in pairs if stride is not None}


def has_line(runs: Mapping[int, MeasuredRun]) -> bool:
    """Return whether the interleaved runs differ in nothing but at least ``LINE_STRIDES`` strides."""
    strides = strides_of(runs)
    others = {runs[position].trained.without_stride() for position in strides}
    return len(set(strides.values())) >= LINE_STRIDES and len(others) == 1


def on_line(quantity: str, runs: Mapping[int, MeasuredRun], known: Mapping[int, MeasuredRun]) -> dict[int, float]:
    """Return the seconds of each interleaved run on the line in 1/stride through the interleaved runs of ``known``.

    Return nothing if ``runs`` have no line, or if fewer than two strides of ``known`` have the quantity.
    """
    if not has_line(runs):
        return {}
    strides = strides_of(runs)
    seconds = {position: measured_s_of(runs[position], quantity) for position in set(strides) & set(known)}
    points = [(1 / strides[position], found_s) for position, found_s in sorted(seconds.items()) if found_s is not None]
    if len({inverse for inverse, _ in points}) < 2:
        return {}
    slope, constant = np.polyfit([inverse for inverse, _ in points], [found_s for _, found_s in points], deg=1)
    return {position: float(constant + slope / stride) for position, stride in strides.items()}


def per_parameter(
    quantity: str, runs: Sequence[MeasuredRun], fitted: Mapping[int, MeasuredRun], *, any_nodes: bool = False
) -> dict[int, float]:
    """Return the seconds of each run that is not fitted, by the seconds per parameter of fitted runs like it.

    They may be of other sweeps and models. For the update, runs of one machine, number of ranks and stride are alike,
    and the parameters are the offloaded ones of a rank. For the rest, the batch and the offloaded share must be equal,
    too, and the parameters are those of the model. With ``any_nodes``, only the ranks per node must be equal.
    """
    rates: dict[Hashable, list[float]] = defaultdict(list)
    for run in fitted.values():
        numel, found_s = _numel(quantity, run), measured_s_of(run, quantity)
        if numel > 0 and found_s is not None:
            rates[_alike(quantity, run, any_nodes)].append(found_s / numel)
    return {
        position: float(np.mean(rates[_alike(quantity, run, any_nodes)])) * _numel(quantity, run)
        for position, run in enumerate(runs)
        if position not in fitted and _alike(quantity, run, any_nodes) in rates and _numel(quantity, run) > 0
    }


def _alike(quantity: str, run: MeasuredRun, any_nodes: bool) -> Hashable:
    assert quantity in QUANTITIES
    ranks = (run.machine, run.tp, run.ranks_on_node if any_nodes else run.dp, run.setting.update_stride)
    if quantity == "update":
        return ranks
    blocking = None if run.batch is None else run.batch.blocking
    return (*ranks, run.setting.cpu_ratio, run.trained.micro_batch, run.trained.accumulation, blocking)


def _numel(quantity: str, run: MeasuredRun) -> int:
    if quantity != "update":
        return run.setting.real_params
    numel = updated_parameters(run.setting)
    return numel.on_cpu + numel.streamed
