"""Place units by simple rules, without a measurement."""

from __future__ import annotations

from perf_model.schedule.placement import Placement
from perf_model.schedule.workload import Workload


def place_all(workload: Workload, placement: Placement) -> tuple[Placement, ...]:
    """Return ``placement`` for every unit except the persistent one, which is on the CPU."""
    return tuple(Placement.CPU if unit.is_persistent else placement for unit in workload.units)


def keep_fixed(workload: Workload, placements: tuple[Placement, ...]) -> tuple[Placement, ...]:
    """Return ``placements``, except for the units whose placement is fixed."""
    return tuple(unit.fixed or placement for unit, placement in zip(workload.units, placements, strict=True))


def place_by_stride(workload: Workload, stride: int) -> tuple[Placement, ...]:
    """Stream every ``stride``-th unit: index i with (i + 1) % stride == 0, without the persistent unit (2410.21316)."""
    first = 0 if workload.persistent_unit is None else 1
    return tuple(
        Placement.STREAMED if unit.index >= first and (unit.index - first + 1) % stride == 0 else Placement.CPU
        for unit in workload.units
    )
