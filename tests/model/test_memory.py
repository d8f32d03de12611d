"""The memory model, by hand: what is reserved, and how the allocators round it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perf_model.prediction.memory import (
    MIB,
    Memory,
    Reservation,
    Where,
    cuda_bytes_of,
    memory_of,
    reserved_by_stock,
    reserved_by_the_runtime,
    resident_bytes_of,
    staging_numel,
)
from perf_model.schedule.host_layout import ALIGNMENT_BYTES, STATES, Widths, parts_of
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Workload
from tests.model.strategies import plans

CPU, STREAMED, RESIDENT = Placement.CPU, Placement.STREAMED, Placement.RESIDENT

NUMEL = 2**24
"""64 MiB of fp32: blocks and powers of two without any rounding."""


def plan(*placements: Placement, num_slots: int = 1, numel: int = NUMEL) -> UpdatePlan:
    return UpdatePlan(workload=Workload.of([numel] * len(placements)), placements=placements, num_slots=num_slots)


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
    """p, m, v, the gradient and the rounded parameters: 16 bytes a parameter, all of it pinned."""
    pinned = (3 * 4 + 2 + 2) * NUMEL
    assert memory_of(plan(CPU)) == Memory(gpu_bytes=0, host_bytes=pinned, pinned_bytes=pinned)
    # An fp32 model has nothing to round.
    assert memory_of(plan(CPU), param_bytes=4).pinned_bytes == (3 * 4 + 4) * NUMEL


def test_a_streamed_sub_group() -> None:
    """p, m and v in a slot, for as many sub-groups as there are slots and streamed ones; each one's gradient."""
    pinned = 3 * 3 * 4 * NUMEL
    for num_slots, slots in ((1, 1), (2, 2), (4, 3)):
        assert memory_of(plan(STREAMED, STREAMED, STREAMED, num_slots=num_slots)) == Memory(
            gpu_bytes=(slots * 3 * 4 + 3 * 2) * NUMEL, host_bytes=pinned, pinned_bytes=pinned
        )


def test_a_slot_is_as_long_as_the_longest_streamed_sub_group() -> None:
    workload = Workload.of([4 * NUMEL, NUMEL, 2 * NUMEL])
    mixed = UpdatePlan(workload=workload, placements=(CPU, STREAMED, STREAMED), num_slots=2)
    assert memory_of(mixed).gpu_bytes == (2 * 3 * 4 * 2 + 2 * 7) * NUMEL, "and all gradients, of the CPU's, too"


def test_a_resident() -> None:
    """p, m, v and the gradient on the accelerator, nothing on the host."""
    assert memory_of(plan(RESIDENT)) == Memory(gpu_bytes=(3 * 4 + 2) * NUMEL, host_bytes=0, pinned_bytes=0)
    assert resident_bytes_of(NUMEL) == 12 * NUMEL, "beside the gradient"


def test_stock_pins_nothing() -> None:
    stock = Memory.of(reserved_by_stock(plan(CPU, RESIDENT), 2))
    assert stock == Memory(gpu_bytes=16 * NUMEL, host_bytes=(12 + 4) * NUMEL + 2 * 2 * NUMEL, pinned_bytes=0)


@given(plans(10**8))
def test_alignment_and_segments_add_little(its: UpdatePlan) -> None:
    memory = memory_of(its)
    on_cpu, resident, streamed = its.numel(CPU), its.numel(RESIDENT), its.numel(STREAMED)
    wanted = 16 * on_cpu + 12 * streamed
    assert memory.host_bytes == memory.pinned_bytes
    assert wanted <= memory.pinned_bytes < wanted + 5 * ALIGNMENT_BYTES * len(its.placements)
    gradients = 2 * its.workload.numel if resident + streamed > 0 else 0
    wanted = 12 * resident + gradients + its.schedule.staging_bytes
    tensors = 3 * (its.placements.count(RESIDENT) + its.schedule.num_slots) + len(its.placements)
    assert wanted <= memory.gpu_bytes <= wanted + 22 * MIB + tensors * 10 * MIB


def test_sums_over_micro_batches_stay_on_the_accelerator_if_anything_does() -> None:
    def gradients(accumulates: bool, *placements: Placement) -> int:
        reserved = reserved_by_the_runtime(plan(*placements), 2, accumulates=accumulates)
        return sum(its.count for its in reserved if its.each_bytes == 2 * NUMEL)

    assert gradients(False, CPU, STREAMED, RESIDENT) == 2
    assert gradients(True, CPU, STREAMED, RESIDENT) == 3
    assert gradients(True, CPU, CPU) == 0


def test_parameters_in_host_memory_are_staged_on_the_accelerator() -> None:
    def reserved(*placements: Placement) -> tuple[int, int]:
        found = reserved_by_the_runtime(plan(*placements), 2, accumulates=False, params_on_host=True)
        pinned_bytes = sum(its.each_bytes for its in found if its.where is Where.PINNED)
        return pinned_bytes, sum(its.count for its in found if its.each_bytes == 2 * NUMEL)

    # One buffer beside the gradients of what the accelerator updates; the CPU rounds to the parameters themselves.
    assert reserved(CPU, STREAMED, RESIDENT) == (14 * NUMEL + 12 * NUMEL, 3)
    assert reserved(CPU, CPU) == (2 * 14 * NUMEL, 0)


@pytest.mark.parametrize(
    ("placements", "grad_bytes", "longest_partition_numel", "buffer_bytes"),
    [
        # A third of the longest partition each, in the dtype that gradients are accumulated in.
        ((CPU, STREAMED), 2, 12_000_000, 8_000_000),
        ((CPU, STREAMED), 4, 6_000_000, 8_000_000),
        ((CPU, STREAMED), 2, 12_000_002, 8_000_000),
        # No more than a link needs to be as fast as it can be.
        ((CPU,) * 8, 2, 10**9, 64 * MIB),
        # No less than 64 KiB, as long as there is so much to send.
        ((CPU, RESIDENT), 2, 1000, MIB // 16),
        # What stays on the accelerator needs none.
        ((STREAMED, RESIDENT), 2, 12_000_000, 0),
    ],
)
def test_gradients_go_down_through_three_buffers(
    placements: tuple[Placement, ...], grad_bytes: int, longest_partition_numel: int, buffer_bytes: int
) -> None:
    its = plan(*placements, numel=10**8)
    assert grad_bytes * staging_numel(its, grad_bytes, longest_partition_numel) == buffer_bytes

    def reserved(longest_partition_numel: int | None, publishes: bool = True) -> list[Reservation]:
        return reserved_by_the_runtime(
            its,
            grad_bytes,
            accumulates=False,
            publishes=publishes,
            longest_partition_numel=longest_partition_numel,
        )

    buffers = Reservation(where=Where.ACCELERATOR, each_bytes=buffer_bytes, count=3)
    expected = [*reserved(None), buffers] if buffer_bytes else reserved(None)
    assert reserved(longest_partition_numel) == expected
    shared = reserved(longest_partition_numel, publishes=False)
    assert shared == reserved(None, publishes=False), "where the accelerator shares host memory nothing goes down"


def test_a_staging_buffer_is_no_longer_than_all_that_goes_down() -> None:
    assert staging_numel(plan(CPU, RESIDENT, numel=1000), 2, 900) == 1000


@given(plans(10**9), st.integers(1, 10**9), st.sampled_from([2, 4]))
def test_staging_takes_no_more_than_stock_or_192_kib(
    its: UpdatePlan, longest_partition_numel: int, grad_bytes: int
) -> None:
    """Stock takes ``grad_bytes`` for each element of a parameter's partition that it brings back up for its norm."""
    taken = 3 * grad_bytes * staging_numel(its, grad_bytes, longest_partition_numel)
    assert taken <= max(grad_bytes * longest_partition_numel, 192 * 2**10)


@given(st.integers(1, 10**9), st.integers(1, 20))
def test_residents_take_at_least_their_blocks(numel: int, count: int) -> None:
    assert memory_of(plan(*[RESIDENT] * count, numel=numel)).gpu_bytes >= count * resident_bytes_of(numel)


WIDTHS = [Widths(param=2, grad=2), Widths(param=2, grad=4), Widths(param=4, grad=4)]
SHARING = Widths(param=2, grad=2, publishes=False)


@given(plans(10**6), st.sampled_from([*WIDTHS, SHARING]))
def test_the_parts_of_a_slab_lie_one_after_another(its: UpdatePlan, widths: Widths) -> None:
    end_bytes = 0
    found: dict[int, list[str]] = {}
    for part in parts_of(its, widths):
        assert end_bytes <= part.offset_bytes < end_bytes + ALIGNMENT_BYTES
        assert part.offset_bytes % ALIGNMENT_BYTES == 0
        assert part.numel == its.workload.sub_groups[part.sub_group].numel
        found.setdefault(part.sub_group, []).append(part.name)
        end_bytes = part.offset_bytes + part.numel * {"grad": widths.grad, "rounded": widths.param}.get(part.name, 4)
    assert end_bytes <= widths.slab_bytes(its) < end_bytes + ALIGNMENT_BYTES
    of_cpu = [*STATES, "grad", "rounded"] if widths.param == 2 and widths.publishes else [*STATES, "grad"]
    for index, placement in enumerate(its.placements):
        assert found.get(index, []) == {CPU: of_cpu, STREAMED: [*STATES], RESIDENT: []}[placement]
