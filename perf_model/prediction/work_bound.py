"""Compute a lower bound of an update: no schedule ends before its busiest resource has done its work."""

from __future__ import annotations

from dataclasses import dataclass

from perf_model.prediction.cost import USES_OF_DISK, CostModel, Resource
from perf_model.prediction.memory import DEFAULT_SETUP, TrainingSetup
from perf_model.schedule.happens_before import CHAINS
from perf_model.schedule.placement import Placement
from perf_model.schedule.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Bound:
    """A lower bound of the seconds of an update, exposed and hidden. ``binding`` is the busiest resource."""

    seconds: float
    binding: Resource


def work_bound(
    workload: Workload, cost: CostModel, gpu_bytes: int | None, setup: TrainingSetup = DEFAULT_SETUP
) -> Bound:
    """Return the least busy time of the busiest resource over all plans that fit in ``gpu_bytes``, None if unlimited.

    A streamed parameter uses at least as much of each resource as a resident one, so as many are resident as fit next
    to the gradients. The time is convex in the share that the accelerator updates.
    """
    numel, each_bytes = workload.numel, setup.widths.states
    busy_s = {placement: cost.busy_s(CHAINS[placement]) for placement in cost.placements}
    disk_s = cost.busy_s(USES_OF_DISK, workload.on_disk_numel)
    free_bytes, gradients_bytes = float("inf") if gpu_bytes is None else gpu_bytes, setup.widths.grad * numel
    if setup.accumulates and setup.keeps_sums(updates_on_accelerator=True):
        free_bytes, gradients_bytes = free_bytes - gradients_bytes, 0

    def busy(share: float) -> dict[Resource, float]:
        resident = min(share, max(0.0, free_bytes - share * gradients_bytes) / (each_bytes * numel))
        shares = {Placement.CPU: 1.0 - share, Placement.STREAMED: share - resident, Placement.RESIDENT: resident}
        return {
            resource: disk_s[resource]
            + numel * sum(shares[placement] * each[resource] for placement, each in busy_s.items())
            for resource in cost.capacities
        }

    low = high = 0.0
    if Placement.STREAMED in cost.placements and free_bytes >= each_bytes * min(unit.numel for unit in workload.units):
        high = min(1.0, free_bytes / gradients_bytes) if gradients_bytes else 1.0
    for _ in range(100):
        left, right = (2 * low + high) / 3, (low + 2 * high) / 3
        if max(busy(left).values()) < max(busy(right).values()):
            high = right
        else:
            low = left
    least_s = busy((low + high) / 2)
    binding = max(least_s, key=lambda resource: least_s[resource])
    return Bound(seconds=least_s[binding], binding=binding)
