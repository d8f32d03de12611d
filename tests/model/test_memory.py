"""Check the memory model against results worked out by hand: the reservations, and the allocators' rounding."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perf_model.prediction.memory import (
    MIB,
    Budgets,
    MemoryKind,
    MemoryUse,
    Reservation,
    TrainingSetup,
    cuda_bytes_of,
    memory_of,
    reserved_by_stock,
    reserved_by_the_runtime,
    staging_numel,
)
from perf_model.schedule.cutting import cut_into_units
from perf_model.schedule.host_layout import ALIGNMENT_BYTES, WIDTHS_OF_STATES, Widths, slab_tensors
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import STATES, Partition, Workload
from tests.model.costs import resident_bytes_of
from tests.model.strategies import plans

CPU, STREAMED, RESIDENT = Placement.CPU, Placement.STREAMED, Placement.RESIDENT

NUMEL = 2**24
"""The length of 64 MiB of fp32: neither blocks nor powers of two are rounded."""


WIDTHS = [Widths(param=2, grad=2), Widths(param=2, grad=4), Widths(param=4, grad=4)]
SHARING = Widths(param=2, grad=2, publishes=False)


def plan(*placements: Placement, num_slots: int = 1, numel: int = NUMEL) -> UpdatePlan:
    """Return a plan of units that all have ``numel`` parameters."""
    return UpdatePlan(
        workload=Workload.from_numels([numel] * len(placements)), placements=placements, num_slots=num_slots
    )


@pytest.mark.parametrize(
    ("each_bytes", "count", "taken"),
    [
        (0, 3, 0),
        # Small blocks share a segment of 2 MiB, and are multiples of 512 B.
        (1, 4096, 2 * MIB),
        (1, 4097, 4 * MIB),
        (MIB, 2, 2 * MIB),
        (MIB, 3, 4 * MIB),
        # Blocks below 10 MiB share a segment of 20 MiB.
        (MIB + 1, 1, 20 * MIB),
        (5 * MIB, 4, 20 * MIB),
        (5 * MIB, 5, 40 * MIB),
        (9 * MIB, 3, 40 * MIB),
        # Each larger block has its own segment.
        (10 * MIB, 1, 10 * MIB),
        (21 * MIB + 1, 2, 44 * MIB),
    ],
)
def test_gpu_memory_is_taken_in_whole_segments(each_bytes: int, count: int, taken: int) -> None:
    assert cuda_bytes_of([Reservation(kind=MemoryKind.ACCELERATOR, each_bytes=each_bytes, count=count)]) == taken


def test_blocks_of_different_lengths_share_a_segment() -> None:
    def reserved(each_bytes: int, count: int) -> Reservation:
        return Reservation(kind=MemoryKind.ACCELERATOR, each_bytes=each_bytes, count=count)

    assert cuda_bytes_of([reserved(8 * MIB, 1), reserved(9 * MIB, 1)]) == 20 * MIB
    assert cuda_bytes_of([reserved(512, 1), reserved(9 * MIB, 1), reserved(64 * MIB, 1)]) == (2 + 20 + 64) * MIB


def test_a_cpu_unit_takes_16_bytes_per_parameter_all_pinned() -> None:
    """Check that p, m, v, the gradient and the rounded parameters are pinned, and nothing is on the accelerator."""
    pinned = (3 * 4 + 2 + 2) * NUMEL
    assert memory_of(plan(CPU)) == MemoryUse(gpu_bytes=0, host_bytes=pinned, pinned_bytes=pinned)
    # An fp32 model has nothing to round.
    assert memory_of(plan(CPU), TrainingSetup(widths=Widths(param=4, grad=4))).pinned_bytes == (3 * 4 + 4) * NUMEL


def test_an_eager_unit_takes_a_second_version_of_its_states_in_host_memory() -> None:
    eager = replace(plan(CPU, CPU), eager=frozenset({1}))
    alone = memory_of(plan(CPU, CPU))
    added = 3 * 4 * NUMEL
    assert memory_of(eager) == replace(alone, host_bytes=alone.host_bytes + added, eager_bytes=added)
    assert Budgets().missing(memory_of(eager)) == {"eager_bytes": added}
    assert Budgets(eager_bytes=added).missing(memory_of(eager)) == {}
    # The steps must not write the model's own parameters before the norm is known. Fp32 masters are published instead.
    for param, added in ((2, (3 * 4 + 2) * NUMEL), (4, 3 * 4 * NUMEL)):
        setup = TrainingSetup(widths=Widths(param=param, grad=param, publishes=False), params_on_host=True)
        assert memory_of(eager, setup).eager_bytes == added


@pytest.mark.parametrize(("states", "each"), [("bf16-masters", 2 + 2 * 4), ("bf16", 3 * 2)])
def test_bf16_states_take_their_bytes_in_every_place(states: str, each: int) -> None:
    """Check host memory, slots, residents, shadows and stock's reservation. Masters are published without a copy."""
    setup = TrainingSetup(widths=WIDTHS_OF_STATES[states])
    on_host = (each + 2) * NUMEL
    assert memory_of(plan(CPU), setup) == MemoryUse(gpu_bytes=0, host_bytes=on_host, pinned_bytes=on_host)
    assert memory_of(plan(STREAMED, STREAMED, num_slots=2), setup).gpu_bytes == (2 * each + 2 * 2) * NUMEL
    assert memory_of(plan(RESIDENT), setup).gpu_bytes == (each + 2) * NUMEL
    eager = replace(plan(CPU, CPU), eager=frozenset({1}))
    for widths in (setup.widths, replace(setup.widths, publishes=False)):
        assert memory_of(eager, replace(setup, widths=widths)).eager_bytes == each * NUMEL
    # The gradient has the dtype of the masters, and the sums of gradients that of the model.
    stock = MemoryUse.from_reservations(reserved_by_stock(plan(CPU), setup.widths))
    assert stock.host_bytes == (each + 2 + 2) * NUMEL


def test_streamed_units_share_the_slots_and_keep_their_gradients_on_the_accelerator() -> None:
    """Check that there is one set of p, m and v per slot, at most one slot per unit, and all gradients."""
    pinned = 3 * 16 * NUMEL
    for num_slots, slots in ((1, 1), (2, 2), (4, 3)):
        assert memory_of(plan(STREAMED, STREAMED, STREAMED, num_slots=num_slots)) == MemoryUse(
            gpu_bytes=(slots * 3 * 4 + 3 * 2) * NUMEL, host_bytes=pinned, pinned_bytes=pinned
        )


def test_a_slot_is_as_long_as_the_longest_streamed_unit() -> None:
    workload = Workload.from_numels([4 * NUMEL, NUMEL, 2 * NUMEL])
    mixed = UpdatePlan(workload=workload, placements=(CPU, STREAMED, STREAMED), num_slots=2)
    assert memory_of(mixed).gpu_bytes == (2 * 3 * 4 * 2 + 2 * 3) * NUMEL, "without the gradients of the CPU unit"
    accumulating = memory_of(mixed, TrainingSetup(accumulates=True))
    assert accumulating.gpu_bytes == (2 * 3 * 4 * 2 + 2 * 7) * NUMEL, "including the gradients of the CPU unit"


def test_a_resident_unit_has_a_place_in_host_memory_to_which_it_can_return() -> None:
    """Check that p, m, v and the gradient are on the accelerator, and that host memory is that of a CPU unit."""
    pinned = memory_of(plan(CPU)).pinned_bytes
    resident = MemoryUse(gpu_bytes=(3 * 4 + 2) * NUMEL, host_bytes=pinned, pinned_bytes=pinned)
    assert memory_of(plan(RESIDENT)) == resident
    assert resident_bytes_of(NUMEL) == 12 * NUMEL, "without the gradient"


def test_stock_pins_nothing() -> None:
    stock = MemoryUse.from_reservations(reserved_by_stock(plan(CPU, RESIDENT)))
    assert stock == MemoryUse(gpu_bytes=16 * NUMEL, host_bytes=(12 + 4) * NUMEL + 2 * 2 * NUMEL, pinned_bytes=0)


@given(plans(10**8))
def test_alignment_and_segments_add_little_to_the_bytes_of_the_tensors(drawn: UpdatePlan) -> None:
    memory = memory_of(drawn)
    resident, streamed = drawn.numel(RESIDENT), drawn.numel(STREAMED)
    wanted = 16 * drawn.workload.numel
    assert memory.host_bytes == memory.pinned_bytes
    assert wanted <= memory.pinned_bytes < wanted + 5 * ALIGNMENT_BYTES * len(drawn.placements)
    gradients = 2 * (resident + streamed)
    wanted = 12 * (resident + drawn.schedule.num_slots * drawn.schedule.slot_numel) + gradients
    tensors = 3 * (drawn.placements.count(RESIDENT) + drawn.schedule.num_slots) + len(drawn.placements)
    assert wanted <= memory.gpu_bytes <= wanted + 22 * MIB + tensors * 10 * MIB


def test_accumulated_gradients_stay_on_the_accelerator_if_any_states_are_updated_there() -> None:
    def gradients(accumulates: bool, grad_bytes: int, *placements: Placement, sums: bool | None = None) -> int:
        widths = Widths(param=2, grad=grad_bytes)
        setup = TrainingSetup(accumulates=accumulates, widths=widths, sums_on_accelerator=sums)
        with_states = plan(*placements, num_slots=1)
        states_bytes = 12 * NUMEL * (placements.count(RESIDENT) + min(1, placements.count(STREAMED)))
        gradients_bytes = memory_of(with_states, setup).gpu_bytes - states_bytes
        assert gradients_bytes % (grad_bytes * NUMEL) == 0
        return gradients_bytes // (grad_bytes * NUMEL)

    for grad_bytes in (2, 4):
        assert gradients(False, grad_bytes, CPU, STREAMED, RESIDENT) == 2
        assert gradients(True, grad_bytes, CPU, STREAMED, RESIDENT) == 3
        assert gradients(True, grad_bytes, CPU, CPU) == 0
        for sums, mixed, on_cpu in ((True, 3, 2), (False, 2, 0)):
            assert gradients(True, grad_bytes, CPU, STREAMED, RESIDENT, sums=sums) == mixed
            assert gradients(True, grad_bytes, CPU, CPU, sums=sums) == on_cpu
            assert gradients(False, grad_bytes, CPU, STREAMED, RESIDENT, sums=sums) == 2


def test_parameters_in_host_memory_are_staged_on_the_accelerator() -> None:
    def reserved(*placements: Placement) -> tuple[int, int]:
        setup = TrainingSetup(widths=SHARING, params_on_host=True)
        found = reserved_by_the_runtime(plan(*placements), setup)
        pinned_bytes = sum(tensors.each_bytes for tensors in found if tensors.kind is MemoryKind.PINNED)
        return pinned_bytes, sum(tensors.count for tensors in found if tensors.each_bytes == 2 * NUMEL)

    # One buffer in addition to the gradients that the accelerator uses; the CPU rounds to the parameters themselves.
    assert reserved(CPU, STREAMED, RESIDENT) == (3 * 14 * NUMEL, 3)
    assert reserved(CPU, CPU) == (2 * 14 * NUMEL, 0)


@pytest.mark.parametrize(
    ("placements", "grad_bytes", "longest_partition_numel", "buffer_bytes"),
    [
        # Each buffer holds a third of the longest partition, in the dtype that gradients are accumulated in.
        ((CPU, STREAMED), 2, 12_000_000, 8_000_000),
        ((CPU, STREAMED), 4, 6_000_000, 8_000_000),
        ((CPU, STREAMED), 2, 12_000_002, 8_000_000),
        # A buffer is not larger than a link needs for its full speed.
        ((CPU,) * 8, 2, 10**9, 64 * MIB),
        # A buffer is not smaller than 64 KiB, if there is that much to copy.
        ((CPU, RESIDENT), 2, 1000, MIB // 16),
        # Gradients that stay on the accelerator need no buffer.
        ((STREAMED, RESIDENT), 2, 12_000_000, 0),
    ],
)
def test_gradients_are_copied_to_host_memory_through_three_buffers(
    placements: tuple[Placement, ...], grad_bytes: int, longest_partition_numel: int, buffer_bytes: int
) -> None:
    update_plan = plan(*placements, numel=10**8)
    assert grad_bytes * staging_numel(update_plan, grad_bytes, longest_partition_numel) == buffer_bytes

    def reserved(longest_partition_numel: int | None, publishes: bool = True) -> list[Reservation]:
        widths = Widths(param=2, grad=grad_bytes, publishes=publishes)
        setup = TrainingSetup(widths=widths, longest_partition_numel=longest_partition_numel)
        return reserved_by_the_runtime(update_plan, setup)

    buffers = Reservation(kind=MemoryKind.ACCELERATOR, each_bytes=buffer_bytes, count=3)
    expected = [*reserved(None), buffers] if buffer_bytes else reserved(None)
    assert reserved(longest_partition_numel) == expected
    shared = reserved(longest_partition_numel, publishes=False)
    assert shared == reserved(None, publishes=False), "an accelerator that shares host memory copies no gradients"


def test_staging_buffers_count_only_where_stock_takes_less_for_the_gradient_of_one_parameter() -> None:
    def counted(longest_partition_numel: int) -> int:
        setup = TrainingSetup(longest_partition_numel=longest_partition_numel)
        return memory_of(plan(CPU, CPU), setup).gpu_bytes

    assert counted(12_000_000) == 0, "stock copies 24 MB back to compute the norm"
    assert counted(1000) == 2 * MIB, "3 buffers of 64 KiB share a segment; stock copies 2 kB"


def test_a_staging_buffer_is_not_longer_than_the_longest_unit_on_the_cpu() -> None:
    assert staging_numel(plan(CPU, RESIDENT, numel=1000), 2, 900) == 1000


@given(plans(10**9), st.integers(1, 10**9), st.sampled_from([2, 4]))
def test_staging_buffers_take_at_most_192_kib_or_as_much_as_stock(
    drawn: UpdatePlan, longest_partition_numel: int, grad_bytes: int
) -> None:
    """Compare with stock, which copies a partition of ``grad_bytes`` per element back to compute its norm."""
    taken = 3 * grad_bytes * staging_numel(drawn, grad_bytes, longest_partition_numel)
    assert taken <= max(grad_bytes * longest_partition_numel, 192 * 2**10)


@given(st.integers(1, 10**9), st.integers(1, 20), st.sampled_from(WIDTHS))
def test_resident_bytes_of_is_a_lower_bound(numel: int, count: int, widths: Widths) -> None:
    memory = memory_of(plan(*[RESIDENT] * count, numel=numel), TrainingSetup(widths=widths))
    assert memory.gpu_bytes >= count * resident_bytes_of(numel)


@given(plans(10**6), st.sampled_from([*WIDTHS, SHARING]))
def test_the_tensors_of_a_slab_follow_one_another_aligned(drawn: UpdatePlan, widths: Widths) -> None:
    workload = drawn.workload
    end_bytes = 0
    found: dict[int, list[str]] = {}
    for tensor in slab_tensors(workload, widths):
        assert end_bytes <= tensor.offset_bytes < end_bytes + ALIGNMENT_BYTES
        assert tensor.offset_bytes % ALIGNMENT_BYTES == 0
        assert tensor.numel == workload.sub_group_numels[tensor.sub_group]
        found.setdefault(tensor.sub_group, []).append(tensor.name)
        width = {"grad": widths.grad, "rounded": widths.param}.get(tensor.name, 4)
        end_bytes = tensor.offset_bytes + tensor.numel * width
    assert end_bytes <= widths.slab_bytes(workload) < end_bytes + ALIGNMENT_BYTES
    has_rounded = widths.param == 2 and widths.publishes
    of_each = [*STATES, "grad", "rounded"] if has_rounded else [*STATES, "grad"]
    assert found == dict.fromkeys(range(len(workload.sub_group_numels)), of_each)


def test_units_of_one_sub_group_share_the_tensors_of_the_slab() -> None:
    cut = cut_into_units([[Partition("layers.0.w", 1000)], [Partition("layers.1.w", 10)]], 300)
    assert len(cut.units) == 5
    assert [tensor.numel for tensor in slab_tensors(cut, WIDTHS[0])] == [1000] * 5 + [10] * 5
