"""Divide the units of a plan into runs with the same placement for the same reason, and state the reason."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from perf_model.schedule.cutting import names_in
from perf_model.schedule.placement import Placement
from perf_model.schedule.rules import PlacementRule
from perf_model.schedule.workload import Unit
from perf_model.training_run.forecast import Forecast
from perf_model.training_run.job import Job
from perf_model.training_run.predictor import Infeasible
from perf_model.units import DIGITS, seconds

ALL_FIT = "GPU memory is enough for the states of all units"


@dataclass(frozen=True, kw_only=True)
class UnitRun:
    """Consecutive units with the same placement, and the reason for it."""

    units: Sequence[Unit]
    placement: Placement
    why: str

    @property
    def indices(self) -> str:
        """Return the index of the only unit, or of the first and the last one."""
        first, last = self.units[0].index, self.units[-1].index
        return str(first) if first == last else f"{first} to {last}"

    @property
    def layers(self) -> str:
        """Return the first and the last layer, each with the number of the part if it is a part of one."""
        first, last = self.units[0].label.partition(" to ")[0], self.units[-1].label.rpartition(" to ")[2]
        return self.units[0].label if len(self.units) == 1 else f"{first} to {last}"

    @property
    def numel(self) -> int:
        """Return the number of parameters."""
        return sum(unit.numel for unit in self.units)


def unit_runs(found: Forecast) -> list[UnitRun]:
    """Return the runs of the plan, in the order of the units."""
    plan = found.planned.plan
    placed = zip(plan.workload.units, plan.placements, strict=True)
    keyed = ((unit, placement, _rules_of(unit, found.job)) for unit, placement in placed)
    grouped = [
        ([unit for unit, _, _ in run], placement, rules)
        for (placement, rules), run in groupby(keyed, key=lambda item: (item[1], item[2]))
    ]
    changes = _changes(found)
    return [
        UnitRun(
            units=units,
            placement=placement,
            why=", ".join(map(str, rules))
            if rules
            else _why(found, units, *changes[placement, units[len(units) // 2].numel]),
        )
        for units, placement, rules in grouped
    ]


def _changes(found: Forecast) -> dict[tuple[Placement, int], tuple[int, dict[Placement, float | None]]]:
    """Return, for the units with each placement and length, the middle one and what moving it would change.

    That is, for each other placement, by how many seconds the exposed time changes; None if that does not fit.
    """
    indices: dict[tuple[Placement, int], list[int]] = defaultdict(list)
    for unit, placement in zip(found.planned.plan.workload.units, found.planned.plan.placements, strict=True):
        indices[placement, unit.numel].append(unit.index)
    middles = {key: of_group[len(of_group) // 2] for key, of_group in indices.items()}
    moves = [(middle, other) for middle in middles.values() for other in found.cost.placements]
    changes_s = found.request.changes_of_exposed_s(found.planned, moves)
    return {
        key: (middle, {other: changes_s[middle, other] for other in found.cost.placements if other is not key[0]})
        for key, middle in middles.items()
    }


def show_change(change_s: float | None) -> str:
    """Return a change of the exposed time for people."""
    if change_s is None:
        return "no memory"
    shown = seconds(change_s, DIGITS)
    return shown if shown.startswith("-") and shown != "-0 s" else f"+{seconds(abs(change_s), DIGITS)}"


def _rules_of(unit: Unit, job: Job) -> tuple[PlacementRule, ...]:
    """Return the rules that fix ``unit``; none if the planner places it."""
    if unit.fixed is None:
        return ()
    rules = map(job.rules.rule_for, names_in(unit, job.sub_groups))
    # The last name may be that of a parameter which begins a few elements before the next unit does.
    return tuple(dict.fromkeys(rule for rule in rules if rule is not None and rule.placement is unit.fixed))


def _why(found: Forecast, units: Sequence[Unit], middle: int, changes_s: Mapping[Placement, float | None]) -> str:
    """Return the reason for a placement of the planner: the place in forward, and the change if a unit is moved."""
    streamed = found.baselines["all_streamed"]
    if Placement.STREAMED not in found.cost.placements and isinstance(streamed, Infeasible):
        return streamed.reason
    plan = found.planned.plan
    if set(plan.placements) == {Placement.RESIDENT}:
        return ALL_FIT
    indices = [unit.index for unit in units]
    where = ""
    if found.windows.forward_s > 0.0 and len(units) < len(plan.placements):
        where = "first in forward: " if found.first_use[0] in indices else ""
        where = "last in forward: " if found.first_use[-1] in indices else where
    moved = ", ".join(f"{other.value} {show_change(change_s)}" for other, change_s in changes_s.items())
    return f"{where}{moved}" + (f" (unit {middle})" if indices != [middle] else "")
