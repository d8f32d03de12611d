"""Check the rule that places units without a measurement."""

from __future__ import annotations

from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import place_by_stride
from perf_model.schedule.workload import Workload


def streamed(placements: tuple[Placement, ...]) -> list[int]:
    """Return the indices of the streamed units."""
    return [index for index, placement in enumerate(placements) if placement is Placement.STREAMED]


def test_stride_streams_the_units_that_the_paper_streams() -> None:
    workload = Workload.from_numels([10] * 7)
    assert streamed(place_by_stride(workload, 2)) == [1, 3, 5]
    assert streamed(place_by_stride(workload, 3)) == [2, 5]
    assert streamed(place_by_stride(workload, 7)) == [6]
    assert streamed(place_by_stride(workload, 8)) == []
    assert streamed(place_by_stride(Workload.from_numels([10]), 2)) == []
