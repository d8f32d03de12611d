"""Find out where the plan of an engine updates each parameter."""

from __future__ import annotations

from typing import Any

from deep_opt_states.zero.internals.compat import partitions_by_name
from perf_model.schedule.placement import Placement


def placements_by_name(optimizer: Any) -> dict[str, Placement]:
    """Return the placement of each parameter of this rank by its name: of the unit with its middle element.

    Units begin at multiples of several elements, so the ends of a parameter may be in other units.
    """
    plan = optimizer._running.plan
    found = {}
    for sub_group, partitions in enumerate(partitions_by_name(optimizer)):
        runs = [(run, unit.index) for unit in plan.workload.units for run in unit.ranges if run.sub_group == sub_group]
        begin = 0
        for partition in partitions:
            middle = begin + partition.numel // 2
            (index,) = (index for run, index in runs if run.begin <= middle < run.end)
            found[partition.name] = plan.placements[index]
            begin += partition.numel
    return found
