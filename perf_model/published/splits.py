"""Divide runs into groups with common rates, and the settings of a group into fitted and predicted ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from perf_model.published.baselines import strides_of
from perf_model.published.runs import MeasuredRun

Runs = Mapping[int, MeasuredRun]
"""Runs by their position in the file."""


class GroupKey(NamedTuple):
    """The values that the runs of one group share: ``sweep`` is blank if they have several, and ``dp`` None."""

    machine: str
    sweep: str
    tp: int
    dp: int | None
    ranks_on_node: int


@dataclass(frozen=True, kw_only=True)
class SettingSplit:
    """A rule by which groups are formed and settings are fitted.

    ``fitted_in`` returns the positions of the runs of one group whose settings are fitted. ``has_lines``: the groups
    are sweeps, in which a straight line in 1/stride may be a baseline.
    """

    rule: str
    key: Callable[[MeasuredRun], GroupKey]
    fitted_in: Callable[[Runs], set[int]]
    has_lines: bool = False

    def groups(self, runs: Sequence[MeasuredRun]) -> dict[GroupKey, Runs]:
        """Return the groups of ``runs``."""
        groups: dict[GroupKey, dict[int, MeasuredRun]] = defaultdict(dict)
        for position, run in enumerate(runs):
            groups[self.key(run)][position] = run
        return dict(groups)

    def fitted(self, groups: Mapping[GroupKey, Runs]) -> dict[int, MeasuredRun]:
        """Return the runs to fit: all runs of a setting that is fitted in any group.

        Two runs with equal settings on one machine should take equally long, whatever their sweeps are.
        """
        settings = {_setting(group[position]) for group in groups.values() for position in self.fitted_in(group)}
        return {
            position: run for group in groups.values() for position, run in group.items() if _setting(run) in settings
        }


def _setting(run: MeasuredRun) -> Hashable:
    return run.machine, run.tp, run.trained


def _outermost_strides(runs: Runs) -> set[int]:
    """Return the runs that are not interleaved, one of the least and one of the greatest stride.

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


def _smaller_models(runs: Runs) -> set[int]:
    """Return the runs of the smaller half of the models."""
    models = sorted({_model(run) for run in runs.values()})
    smaller = models[: (len(models) + 1) // 2]
    return {position for position, run in runs.items() if _model(run) in smaller}


def _model(run: MeasuredRun) -> tuple[int, str]:
    return run.setting.real_params, run.model_name


def _fewer_nodes(runs: Runs) -> set[int]:
    """Return the runs on the smaller half of the numbers of nodes."""
    numbers = sorted({run.nodes for run in runs.values()})
    fewer = numbers[: (len(numbers) + 1) // 2]
    return {position for position, run in runs.items() if run.nodes in fewer}


STRIDES = SettingSplit(
    rule="In each sweep, the settings that are not interleaved and those of the least and the greatest stride are "
    "fitted, and the settings in between are predicted. A setting includes micro-batch and accumulation, and one that "
    "is fitted in a sweep is fitted in all sweeps of the machine.",
    key=lambda run: GroupKey(run.machine, run.sweep, run.tp, run.dp, run.ranks_on_node),
    fitted_in=_outermost_strides,
    has_lines=True,
)

MODELS = SettingSplit(
    rule="Of each machine, the smaller half of the models, rounded up, is fitted, and the larger ones predicted.",
    key=lambda run: GroupKey(run.machine, "", run.tp, run.dp, run.ranks_on_node),
    fitted_in=_smaller_models,
)

NODES = SettingSplit(
    rule="Of the runs with the same machine and ranks per node, those on the smaller half of the numbers of nodes, "
    "rounded up, are fitted, and those on more nodes predicted.",
    key=lambda run: GroupKey(run.machine, "", run.tp, None, run.ranks_on_node),
    fitted_in=_fewer_nodes,
)
