"""Divide the units of a plan into runs with the same placement for the same reason, and state the reason."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from perf_model.schedule.cutting import partitions_in
from perf_model.schedule.placement import Placement
from perf_model.schedule.rules import PlacementRule
from perf_model.schedule.workload import Unit
from perf_model.training_run.forecast import Forecast, Infeasible
from perf_model.training_run.job import Job
from perf_model.units import DIGITS, seconds


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
        """Return the first and the last layer, with the numbers of their parts if they are cut."""
        first, last = self.units[0].label.partition(" to ")[0], self.units[-1].label.rpartition(" to ")[2]
        return self.units[0].label if len(self.units) == 1 else f"{first} to {last}"

    @property
    def numel(self) -> int:
        """Return the number of parameters."""
        return sum(unit.numel for unit in self.units)


def unit_runs(found: Forecast) -> list[UnitRun]:
    """Return the runs of the plan in order. The reason is that of the middle unit among units of equal length."""
    plan = found.planned.plan
    placed = list(zip(plan.workload.units, plan.placements, strict=True))
    equal: dict[tuple[Placement, int], list[int]] = defaultdict(list)
    for unit, placement in placed:
        equal[placement, unit.numel].append(unit.index)
    middles = {kind: indices[len(indices) // 2] for kind, indices in equal.items()}
    others = {placement: [each for each in found.cost.placements if each is not placement] for placement in Placement}
    moves = [(middle, other) for (placement, _), middle in middles.items() for other in others[placement]]
    changes_s = found.request.changes_of_exposed_s(found.planned, moves)
    runs = []
    for (placement, rules), run in groupby(placed, key=lambda item: (item[1], _rules_of(item[0], found.job))):
        units = [unit for unit, _ in run]
        middle = middles[placement, units[len(units) // 2].numel]
        moved_s = {other: changes_s[middle, other] for other in others[placement]}
        why = ", ".join(map(str, rules)) or _why(found, units, middle, moved_s)
        runs.append(UnitRun(units=units, placement=placement, why=why))
    return runs


def show_change(change_s: float | None) -> str:
    """Return a change of the exposed time as text. None means that there is no memory for it."""
    if change_s is None:
        return "no memory"
    shown = seconds(change_s, DIGITS)
    return shown if shown.startswith("-") and shown != "-0 s" else f"+{seconds(abs(change_s), DIGITS)}"


def _rules_of(unit: Unit, job: Job) -> tuple[PlacementRule, ...]:
    if unit.fixed is None:
        return ()
    rules = (job.rules.rule_for(partition.name) for partition, _ in partitions_in(unit, job.sub_groups))
    # The last partition may be one which starts a few elements before the next unit does.
    return tuple(dict.fromkeys(rule for rule in rules if rule is not None and rule.placement is unit.fixed))


def _why(found: Forecast, units: Sequence[Unit], middle: int, moved_s: Mapping[Placement, float | None]) -> str:
    streamed = found.baselines["all_streamed"]
    if Placement.STREAMED not in found.cost.placements and isinstance(streamed, Infeasible):
        return streamed.reason
    placements = found.planned.plan.placements
    if set(placements) == {Placement.RESIDENT}:
        return "GPU memory is enough for the states of all units"
    indices = [unit.index for unit in units]
    where = ""
    if found.windows.forward_s > 0.0 and len(units) < len(placements):
        where = "first in forward: " if found.first_use[0] in indices else ""
        where = "last in forward: " if found.first_use[-1] in indices else where
    moved = ", ".join(f"{other.value} {show_change(change_s)}" for other, change_s in moved_s.items())
    return f"{where}{moved}" + (f" (unit {middle})" if indices != [middle] else "")
