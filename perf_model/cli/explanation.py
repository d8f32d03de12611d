"""Explain a plan: its units, the resource that each group of them fills, and the effect of one more GB or core."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

from perf_model.cli.inputs import Inputs
from perf_model.prediction.cost import CPU_ADAM, USES_OF_DISK, Resource, cpu_adam_params_per_s, traffic_by_action
from perf_model.prediction.hardware import HardwareProfile, Measurement
from perf_model.schedule.action import ActionKind
from perf_model.schedule.cutting import partitions_in
from perf_model.schedule.happens_before import CHAINS
from perf_model.schedule.host_layout import Widths
from perf_model.schedule.placement import Placement
from perf_model.schedule.workload import Unit
from perf_model.training_run.forecast import Forecast
from perf_model.training_run.job import Job
from perf_model.units import DIGITS, GB, billions, counted, percent, seconds, size_of

NOTICED_SHARE = 0.001
"""The least share of an iteration that counts as a change: the planner stops at smaller ones."""


def busy_s(found: Forecast) -> dict[Resource, float]:
    """Return the seconds for which the update keeps each resource busy."""
    plan, cost = found.planned.plan, found.cost
    each_s = {placement: cost.busy_s(CHAINS[placement]) for placement in cost.placements}
    on_disk_s = cost.busy_s(USES_OF_DISK, plan.workload.on_disk_numel)
    return {
        resource: disk_s + sum(plan.numel(placement) * of_one[resource] for placement, of_one in each_s.items())
        for resource, disk_s in on_disk_s.items()
    }


def explain(found: Forecast, inputs: Inputs) -> Iterator[str]:
    """Yield a sentence for each group: the resource that it fills, and the change with one more core or GB."""
    plan, limits, update_s, total_s = found.planned.plan, inputs.limits, found.planned.update_s, busy_s(found)
    if limits.gpu is not None:
        gpu = replace(inputs, limits=replace(limits, gpu=limits.gpu + GB))
        gpu_gain = f"1 GB more of GPU memory {_gain(found, gpu)}"
    for placement in found.cost.placements:
        if not (count := plan.placements.count(placement)):
            continue
        of_one_s = found.cost.busy_s(CHAINS[placement])
        busiest = max(of_one_s, key=lambda resource: of_one_s[resource])
        share = percent(total_s[busiest] / update_s)
        full = f"{busiest.value} in use for {share} of the update"
        gain = "GPU memory is unlimited" if limits.gpu is None else gpu_gain
        if placement is Placement.CPU:
            core = _gain(found, replace(inputs, profile=_with_one_more_core(inputs.profile, found.job.setup.widths)))
            gain = f"one more core per rank {core}"
        elif placement is Placement.RESIDENT:
            full = f"{size_of(found.memory.gpu_bytes, limits.gpu)} of GPU memory in use"
        placed = f"{counted(count, 'unit')}, {billions(plan.numel(placement))} parameters"
        yield f"{placement.value}: {placed}, {full}; {gain}."
    if numel := plan.workload.on_disk_numel:
        share = percent(total_s[Resource.DISK] / update_s)
        more = replace(inputs, limits=replace(limits, host=(limits.host or 0) + GB))
        gain = f"1 GB more of --host-memory-gb {_gain(found, more)}"
        yield f"on disk: {billions(numel)} parameters of cpu units, disk in use for {share} of the update; {gain}."
    if plan.eager:
        more = replace(inputs, limits=replace(limits, eager=(found.budgets.eager_bytes or 0) + GB))
        gain = f"1 GB more of --eager-memory-gb {_gain(found, more)}"
        yield f"eager units: {len(plan.eager)}, {billions(plan.eager_numel)} parameters; {gain}."


def _gain(found: Forecast, more: Inputs) -> str:
    gain_s = found.predicted.iteration_s - more.forecast().predicted.iteration_s
    if gain_s < NOTICED_SHARE * found.predicted.iteration_s:
        return "would change nothing"
    return f"would shorten the iteration by {seconds(gain_s, DIGITS)}"


def _with_one_more_core(profile: HardwareProfile, widths: Widths) -> HardwareProfile:
    """Return the profile with a CPU update that is faster by one core's share, at most as fast as host memory."""
    name, cores = CPU_ADAM[widths.master, widths.moment], max(1, profile.provenance.cores)
    rate, moved_bytes = cpu_adam_params_per_s(profile, widths), traffic_by_action(widths)[ActionKind.CPU_STEP].dram
    most = max(rate, profile.rate("dram_update_bytes_per_s") / moved_bytes)
    faster = Measurement(samples=(min(most, rate * (cores + 1) / cores),))
    return replace(profile, measurements={**profile.measurements, name: faster})


def rule_of(unit: Unit, job: Job) -> str:
    """Return the rules by name that fix the placement of ``unit``, an empty text if the planner chose it."""
    if unit.fixed is None:
        return ""
    rules = (job.rules.rule_for(partition.name) for partition, _ in partitions_in(unit, job.sub_groups))
    # The last partition may be one which starts a few elements before the next unit does.
    return ", ".join(dict.fromkeys(str(rule) for rule in rules if rule is not None and rule.placement is unit.fixed))


def unit_rows(found: Forecast) -> list[tuple[str, ...]]:
    """Return indices, layers, parameters, placement and rule of each run of units that have the same two last ones."""
    plan = found.planned.plan
    rows: list[tuple[str, ...]] = []
    placed = [
        (unit, f"{where.value}, on disk" if unit.is_on_disk else where.value)
        for unit, where in zip(plan.workload.units, plan.placements, strict=True)
    ]
    for (where, rule), run in groupby(placed, key=lambda each: (each[1], rule_of(each[0], found.job))):
        units = [unit for unit, _ in run]
        first, last = units[0], units[-1]
        indices, layers = str(first.index), first.label
        if last is not first:
            indices = f"{first.index} to {last.index}"
            layers = f"{first.label.partition(' to ')[0]} to {last.label.rpartition(' to ')[2]}"
        numel = sum(unit.numel for unit in units)
        rows.append((indices, layers, f"{numel / 1e6:,.1f} M", where, rule))
    return rows
