"""Compute the accelerator, host and pinned memory that a plan needs, rounded as the allocators round it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from perf_model.schedule.host_layout import Widths
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.schedule import STAGED_BYTES_PER_PARAM
from perf_model.schedule.workload import FP32_BYTES

MIB = 2**20

NUM_STAGING_BUFFERS = 3
"""The number of buffers for gradients on their way to host memory: one is filled, one is copied down, one is free."""

LARGEST_STAGING_BUFFER_BYTES = 64 * MIB
"""The upper limit of a staging buffer's size. With a buffer of this size, a link reaches its full speed."""

SMALLEST_STAGING_BUFFER_BYTES = 64 * 2**10
"""The lower limit of a staging buffer's size. A smaller buffer would save no memory, because PyTorch takes blocks of up
to 1 MiB from the device in segments of 2 MiB."""


class MemoryKind(Enum):
    """The memory that a reservation is made in."""

    ACCELERATOR = "accelerator"
    PINNED = "pinned"
    """Page-locked host memory."""
    HOST = "host"
    """Pageable host memory."""


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """``count`` tensors of ``each_bytes`` each."""

    kind: MemoryKind
    each_bytes: int
    count: int = 1


def reserved_by_the_runtime(
    plan: UpdatePlan,
    param_bytes: int,
    *,
    accumulates: bool,
    publishes: bool = True,
    params_on_host: bool = False,
    longest_partition_numel: int | None = None,
) -> list[Reservation]:
    """Return the memory that the runtime reserves for ``plan``.

    It is reserved once, so it counts in the peaks of backward and forward as well as in that of the update. It consists
    of one slab of page-locked memory, and of states and gradients on the accelerator.

    ``param_bytes`` is 2 for 16-bit models and 4 for fp32 models. ``accumulates``: gradients are accumulated over
    micro-batches. Gradients are assumed to be in the dtype of the model, in which DeepSpeed accumulates them by
    default. If everything is updated on the CPU, they are assumed to be accumulated in host memory; the runtime
    accumulates them on the accelerator if enough of its memory is free. ``publishes`` is that of ``Widths``.
    ``params_on_host``: DeepSpeed offloads parameters from an accelerator that has its own memory; a buffer in that
    memory then stages the largest sub-group that the accelerator updates.

    ``longest_partition_numel`` is that of ``staging_numel``. Without it, the buffers for gradients on their way to host
    memory are left out. They need no additional memory: stock takes as much of the accelerator (``staging_numel``).
    """
    widths = Widths(param=param_bytes, grad=param_bytes, publishes=publishes and not params_on_host)
    numels = _numels_by_placement(plan)
    streamed, residents = numels[Placement.STREAMED], numels[Placement.RESIDENT]
    kept = [*streamed, *residents]
    if accumulates and kept:
        # Gradients of CPU sub-groups are accumulated there, too: ``memory_of`` counts memory for all of them.
        kept += numels[Placement.CPU]
    staging = []
    if publishes and longest_partition_numel is not None:
        staging = staging_buffers(plan, param_bytes, longest_partition_numel)
    return [
        Reservation(kind=MemoryKind.PINNED, each_bytes=widths.slab_bytes(plan)),
        *states_on_accelerator(streamed, residents, plan.num_slots),
        *gradients_on_accelerator(kept, param_bytes),
        *(rounding_buffer(plan, param_bytes) if params_on_host else []),
        *staging,
    ]


def rounding_buffer(plan: UpdatePlan, param_bytes: int) -> list[Reservation]:
    """Return the buffer that an update on the accelerator rounds to, before parameters are copied to host memory."""
    each_bytes = plan.largest_on_accelerator * param_bytes
    return [Reservation(kind=MemoryKind.ACCELERATOR, each_bytes=each_bytes)] if each_bytes else []


def staging_numel(plan: UpdatePlan, grad_bytes: int, longest_partition_numel: int) -> int:
    """Return the length of each of the ``NUM_STAGING_BUFFERS`` through which gradients are copied to host memory.

    It is 0 if no gradient is copied. ``longest_partition_numel`` is the length of the longest partition of one
    parameter.

    All buffers together take ``grad_bytes * longest_partition_numel`` bytes, and at most 192 MiB. If that is less than
    192 KiB, the buffers are 64 KiB each, or as long as the longest sub-group if that is less.

    Stock takes that much, too: with an offloaded optimizer it keeps gradients in host memory and copies each of them
    back to the accelerator to compute its norm. That takes ``grad_bytes`` per parameter, in addition to the fp32 copy
    of 4 bytes per parameter whose norm it computes (``stage3.py``, ``partition_grads``). The runtime computes the same
    norm from the reduced gradient, without the copy back.
    """
    longest_sub_group = max(_numels_by_placement(plan)[Placement.CPU], default=0)
    share = longest_partition_numel // NUM_STAGING_BUFFERS
    smallest, largest = (
        size_bytes // grad_bytes for size_bytes in (SMALLEST_STAGING_BUFFER_BYTES, LARGEST_STAGING_BUFFER_BYTES)
    )
    return min(longest_sub_group, largest, max(smallest, share))


def staging_buffers(plan: UpdatePlan, grad_bytes: int, longest_partition_numel: int) -> list[Reservation]:
    """Return the buffers that ``staging_numel`` describes."""
    each_bytes = grad_bytes * staging_numel(plan, grad_bytes, longest_partition_numel)
    if each_bytes == 0:
        return []
    return [Reservation(kind=MemoryKind.ACCELERATOR, each_bytes=each_bytes, count=NUM_STAGING_BUFFERS)]


def accelerator_bytes_with_all_gradients(plan: UpdatePlan, grad_bytes: int) -> int:
    """Return the bytes of accelerator memory that ``plan`` needs if all gradients stay there.

    This includes the gradients of the sub-groups that the CPU updates. Gradients take ``grad_bytes`` per parameter.
    """
    numels = _numels_by_placement(plan)
    states = states_on_accelerator(numels[Placement.STREAMED], numels[Placement.RESIDENT], plan.num_slots)
    every = [sub_group.numel for sub_group in plan.workload.sub_groups]
    return cuda_bytes_of([*states, *gradients_on_accelerator(every, grad_bytes)])


def states_on_accelerator(streamed: Sequence[int], residents: Sequence[int], num_slots: int) -> list[Reservation]:
    """Return p, m and v in slots and of resident sub-groups, given the lengths of streamed and resident sub-groups."""
    num_slots = min(num_slots, len(streamed))
    lengths = {max(streamed, default=0): num_slots}
    for numel, count in Counter(residents).items():
        lengths[numel] = lengths.get(numel, 0) + count
    parts = STAGED_BYTES_PER_PARAM // FP32_BYTES
    return [
        Reservation(kind=MemoryKind.ACCELERATOR, each_bytes=numel * FP32_BYTES, count=parts * count)
        for numel, count in lengths.items()
    ]


def gradients_on_accelerator(numels: Iterable[int], param_bytes: int) -> list[Reservation]:
    """Return the gradients of sub-groups of these lengths."""
    return [
        Reservation(kind=MemoryKind.ACCELERATOR, each_bytes=numel * param_bytes, count=count)
        for numel, count in Counter(numels).items()
    ]


def reserved_by_stock(plan: UpdatePlan, param_bytes: int) -> list[Reservation]:
    """Return the memory that DeepSpeed's own optimizer reserves for ``plan``, which streams nothing.

    Resident sub-groups are those that Twin-Flow keeps on the accelerator. DeepSpeed reserves fp32 states and gradients
    (``stage3.py``: ``fp32_partitioned_groups_flat``), and the gradients that it accumulates over micro-batches
    (``grad_partitions_flat_buffer``). In host memory they are pageable, unless ``offload_optimizer.pin_memory`` is set.
    """
    reservations = [Reservation(kind=MemoryKind.HOST, each_bytes=plan.workload.numel * param_bytes)]
    for numel, placement, count in _sizes(plan):
        kind = MemoryKind.ACCELERATOR if placement is Placement.RESIDENT else MemoryKind.HOST
        reservations.append(Reservation(kind=kind, each_bytes=numel * FP32_BYTES, count=4 * count))
    return reservations


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """The bytes that one rank needs. ``host_bytes`` includes ``pinned_bytes``."""

    gpu_bytes: int
    host_bytes: int
    pinned_bytes: int

    @classmethod
    def from_reservations(cls, reservations: Iterable[Reservation]) -> MemoryUse:
        """Return the sums of ``reservations``.

        GPU memory is rounded as PyTorch's allocator rounds it; the slab is page-locked without rounding.
        """
        by_kind: dict[MemoryKind, list[Reservation]] = {kind: [] for kind in MemoryKind}
        for reservation in reservations:
            by_kind[reservation.kind].append(reservation)
        pinned_bytes = sum(pinned.count * pinned.each_bytes for pinned in by_kind[MemoryKind.PINNED])
        return cls(
            gpu_bytes=cuda_bytes_of(by_kind[MemoryKind.ACCELERATOR]),
            host_bytes=pinned_bytes
            + sum(pageable.count * pageable.each_bytes for pageable in by_kind[MemoryKind.HOST]),
            pinned_bytes=pinned_bytes,
        )


def memory_of(plan: UpdatePlan, param_bytes: int = 2) -> MemoryUse:
    """Return the most memory that the optimizer needs with ``plan``.

    As soon as something is updated on the accelerator, memory for all gradients is counted there, as without
    offloading. If everything is updated on the CPU, this memory is not counted: 2 bytes per parameter of a 16-bit
    model.
    """
    return MemoryUse.from_reservations(reserved_by_the_runtime(plan, param_bytes, accumulates=True))


def cuda_bytes_of(reservations: Iterable[Reservation]) -> int:
    """Return the bytes that ``CUDACachingAllocator`` takes from the device for ``reservations``.

    Blocks are multiples of 512 B. Blocks up to 1 MiB share segments of 2 MiB, and blocks below 10 MiB share segments of
    20 MiB. Each larger block has its own segment, a multiple of 2 MiB. A segment holds whole blocks: the allocator
    takes a new segment when the last one has no space for another block (``c10/cuda/CUDACachingAllocator.cpp``).
    """
    taken_bytes = 0
    free_bytes = {2 * MIB: 0, 20 * MIB: 0}
    for tensors in reservations:
        block_bytes = _round_up(tensors.each_bytes, 512)
        if block_bytes >= 10 * MIB:
            taken_bytes += tensors.count * _round_up(block_bytes, 2 * MIB)
        elif block_bytes > 0:
            segment_bytes = 2 * MIB if block_bytes <= MIB else 20 * MIB
            in_the_last = min(tensors.count, free_bytes[segment_bytes] // block_bytes)
            free_bytes[segment_bytes] -= in_the_last * block_bytes
            if in_the_last < tensors.count:
                segments, rest = divmod(tensors.count - in_the_last - 1, segment_bytes // block_bytes)
                taken_bytes += (segments + 1) * segment_bytes
                free_bytes[segment_bytes] = segment_bytes - (rest + 1) * block_bytes
    return taken_bytes


def resident_bytes_of(numel: int) -> int:
    """Return the least bytes that p, m and v of that length take, in a slot or resident: those of whole blocks."""
    block_bytes = _round_up(numel * FP32_BYTES, 512)
    return 3 * (_round_up(block_bytes, 2 * MIB) if block_bytes >= 10 * MIB else block_bytes)


def _sizes(plan: UpdatePlan) -> Iterator[tuple[int, Placement, int]]:
    """Yield each length of a sub-group with its placement, and the number of sub-groups that have both."""
    return ((numel, placement, count) for (numel, placement), count in Counter(_placed(plan)).items())


def _numels_by_placement(plan: UpdatePlan) -> dict[Placement, list[int]]:
    return {
        placement: [numel for numel, candidate in _placed(plan) if candidate is placement] for placement in Placement
    }


def _placed(plan: UpdatePlan) -> Iterator[tuple[int, Placement]]:
    placed = zip(plan.workload.sub_groups, plan.placements, strict=True)
    return ((sub_group.numel, placement) for sub_group, placement in placed)


def _round_up(size_bytes: int, multiple: int) -> int:
    return -(-size_bytes // multiple) * multiple
