"""Check the rules that place units without a measurement."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from perf_model.schedule.placement import Placement
from perf_model.schedule.simple_placements import place_all, place_by_fraction, place_by_stride
from perf_model.schedule.workload import Workload
from tests.model.strategies import numels


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


def test_fraction_counts_parameters_and_not_units() -> None:
    assert streamed(place_by_fraction(Workload.from_numels([1, 1, 1, 1, 96]), 0.96)) != [0, 1, 2, 3]
    assert streamed(place_by_fraction(Workload.from_numels([10] * 6), 0.5)) == [1, 3, 5]


@given(numels(), st.floats(0, 1))
def test_streamed_fraction_is_met_at_every_prefix(lengths: list[int], fraction: float) -> None:
    placements = place_by_fraction(Workload.from_numels(lengths), fraction)
    seen = placed = 0
    for numel, placement in zip(lengths, placements, strict=True):
        seen += numel
        placed += numel if placement is Placement.STREAMED else 0
        assert abs(placed - fraction * seen) <= max(lengths) / 2 + 1e-6 * seen


@given(numels())
def test_fraction_0_streams_nothing_and_fraction_1_everything(lengths: list[int]) -> None:
    workload = Workload.from_numels(lengths)
    assert place_by_fraction(workload, 0.0) == place_all(workload, Placement.CPU)
    assert place_by_fraction(workload, 1.0) == place_all(workload, Placement.STREAMED)
