"""Order the units of an update: the streamed and resident ones by their update, the CPU ones by their publish.

All lanes should finish together, so the units are merged by the share of the parameters that each lane has then
updated. Only the order of the units of one placement matters for the schedule: the CPU and the accelerator have lanes
of their own, which do not wait for one another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from perf_model.schedule.placement import Placement
from perf_model.schedule.workload import Workload


def forward_order(
    workload: Workload, placements: Sequence[Placement], first_use: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Return an order in which forward finds the units of each placement ready in the order of their first use.

    ``first_use`` names every unit once, in the order in which forward uses them; None stands for the order of the
    indices. Resident units come first: they are ready immediately.
    """
    in_order = list(range(len(placements)) if first_use is None else first_use)
    if (persistent := workload.persistent_unit) is not None:
        # First: ``step()`` waits for it.
        in_order.remove(persistent)
        in_order.insert(0, persistent)
    by_placement = {
        placement: [index for index in in_order if placements[index] is placement] for placement in Placement
    }
    residents = by_placement.pop(Placement.RESIDENT)
    return (*residents, *_merge_by_progress(workload, by_placement))


def _merge_by_progress(workload: Workload, by_placement: dict[Placement, list[int]]) -> Iterable[int]:
    """Merge the units in the order in which they are due.

    A CPU unit is due when it should be done, and any other unit when it should be half done. Time is measured
    by the share of the parameters of the same placement that are updated by then.
    """
    due: list[tuple[float, bool, int]] = []
    for placement, indices in by_placement.items():
        total = sum(workload.units[index].numel for index in indices)
        seen = 0
        for index in indices:
            numel = workload.units[index].numel
            done = seen + numel
            on_cpu = placement is Placement.CPU
            due.append(((done if on_cpu else seen + numel / 2) / total, on_cpu, index))
            seen = done
    return (index for _, _, index in sorted(due))
