"""The memory model, by hand: what is reserved, and how the allocators round it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perf_model.memory import (
    MIB,
    Memory,
    Reservation,
    Where,
    cuda_bytes_of,
    memory_of,
    pinned_bytes_of,
    reserved_by_stock,
    resident_bytes_of,
)
from perf_model.placement import Placement
from perf_model.plan import UpdatePlan
from perf_model.workload import Workload
from tests.model.strategies import plans

CPU, STREAMED, RESIDENT = Placement.CPU, Placement.STREAMED, Placement.RESIDENT

NUMEL = 2**24
"""64 MiB of fp32: blocks and powers of two without any rounding."""


def plan(*placements: Placement, num_slots: int = 1, numel: int = NUMEL) -> UpdatePlan:
    return UpdatePlan(workload=Workload.of([numel] * len(placements)), placements=placements, num_slots=num_slots)


@pytest.mark.parametrize(
    ("requested", "taken"),
    [(0, 0), (1, 1), (512, 512), (513, 1024), (MIB, MIB), (MIB + 1, 2 * MIB), (3 * MIB, 4 * MIB)],
)
def test_pinned_memory_is_taken_in_powers_of_two(requested: int, taken: int) -> None:
    assert pinned_bytes_of(requested) == taken


@pytest.mark.parametrize(
    ("each_bytes", "count", "taken"),
    [
        (0, 3, 0),
        # Small blocks share a segment of 2 MiB, and are multiples of 512 B.
        (1, 4096, 2 * MIB),
        (1, 4097, 4 * MIB),
        (MIB, 2, 2 * MIB),
        (MIB, 3, 4 * MIB),
        # Those below 10 MiB share one of 20 MiB.
        (MIB + 1, 1, 20 * MIB),
        (5 * MIB, 4, 20 * MIB),
        (5 * MIB, 5, 40 * MIB),
        (9 * MIB, 3, 40 * MIB),
        # Larger ones have their own.
        (10 * MIB, 1, 10 * MIB),
        (21 * MIB + 1, 2, 44 * MIB),
    ],
)
def test_gpu_memory_is_taken_in_segments(each_bytes: int, count: int, taken: int) -> None:
    assert cuda_bytes_of([Reservation(where=Where.ACCELERATOR, each_bytes=each_bytes, count=count)]) == taken


def test_segments_are_shared_by_what_fits_in() -> None:
    def reserved(each_bytes: int, count: int) -> Reservation:
        return Reservation(where=Where.ACCELERATOR, each_bytes=each_bytes, count=count)

    assert cuda_bytes_of([reserved(8 * MIB, 1), reserved(9 * MIB, 1)]) == 20 * MIB
    assert cuda_bytes_of([reserved(512, 1), reserved(9 * MIB, 1), reserved(64 * MIB, 1)]) == (2 + 20 + 64) * MIB


def test_a_cpu_sub_group() -> None:
    """p, m, v and the rounded parameters are pinned; the gradient waits in pageable memory, as fp32 and 16-bit."""
    pinned = (3 * 4 + 2) * NUMEL
    assert memory_of(plan(CPU)) == Memory(gpu_bytes=0, host_bytes=pinned + (4 + 2) * NUMEL, pinned_bytes=pinned)
    # An fp32 model has nothing to round.
    assert memory_of(plan(CPU), param_bytes=4).pinned_bytes == 3 * 4 * NUMEL


def test_a_streamed_sub_group() -> None:
    """p, m, v and the gradient in a slot, for as many sub-groups as there are slots and streamed ones."""
    pinned = 3 * 3 * 4 * NUMEL
    for num_slots, slots in ((1, 1), (2, 2), (4, 3)):
        assert memory_of(plan(STREAMED, STREAMED, STREAMED, num_slots=num_slots)) == Memory(
            gpu_bytes=slots * 4 * 4 * NUMEL, host_bytes=pinned + 3 * (4 + 2) * NUMEL, pinned_bytes=pinned
        )


def test_a_slot_is_as_long_as_the_longest_streamed_sub_group() -> None:
    workload = Workload.of([4 * NUMEL, NUMEL, 2 * NUMEL])
    mixed = UpdatePlan(workload=workload, placements=(CPU, STREAMED, STREAMED), num_slots=2)
    assert memory_of(mixed).gpu_bytes == 2 * 4 * 4 * 2 * NUMEL


def test_a_resident() -> None:
    """p, m, v and the fp32 gradient on the accelerator; on the host only DeepSpeed's buffer of 16-bit gradients."""
    assert memory_of(plan(RESIDENT)) == Memory(gpu_bytes=4 * 4 * NUMEL, host_bytes=2 * NUMEL, pinned_bytes=0)
    assert resident_bytes_of(NUMEL) == 16 * NUMEL


def test_stock_pins_nothing() -> None:
    stock = Memory.of(reserved_by_stock(plan(CPU, RESIDENT), 2))
    assert stock == Memory(gpu_bytes=16 * NUMEL, host_bytes=(12 + 4) * NUMEL + 2 * 2 * NUMEL, pinned_bytes=0)


@given(plans(10**8))
def test_rounding_adds_and_never_doubles_more_than_its_segment(its: UpdatePlan) -> None:
    memory = memory_of(its)
    resident, streamed = its.numel(RESIDENT), its.numel(STREAMED)
    states = 12 * (its.numel(CPU) + streamed) + 2 * its.numel(CPU)
    assert states <= memory.pinned_bytes < 2 * states + 1
    assert memory.host_bytes == memory.pinned_bytes + 2 * its.workload.numel + 4 * (its.workload.numel - resident)
    wanted = 16 * resident + its.schedule.staging_bytes
    tensors = 4 * (its.placements.count(RESIDENT) + its.schedule.num_slots)
    assert wanted <= memory.gpu_bytes <= wanted + 22 * MIB + tensors * 10 * MIB


@given(st.integers(1, 10**9), st.integers(1, 20))
def test_residents_take_at_least_their_blocks(numel: int, count: int) -> None:
    assert memory_of(plan(*[RESIDENT] * count, numel=numel)).gpu_bytes >= count * resident_bytes_of(numel)
