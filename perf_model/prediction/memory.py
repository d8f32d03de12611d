"""What a plan takes of accelerator, host and pinned memory, with the rounding of the allocators that serve it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from perf_model.schedule.host_layout import FP32_BYTES, Widths
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.schedule import STAGED_BYTES_PER_PARAM

MIB = 2**20

NUM_STAGING_BUFFERS = 3
"""The number of buffers for gradients on their way to host memory: one is filled, one is copied down, one is free."""

LARGEST_STAGING_BUFFER_BYTES = 64 * MIB
"""At that size a link is as fast as it can be."""

SMALLEST_STAGING_BUFFER_BYTES = 64 * 2**10
"""Smaller buffers would save nothing: PyTorch takes blocks of up to 1 MiB from the device in segments of 2 MiB."""


class Where(Enum):
    ACCELERATOR = "accelerator"
    PINNED = "pinned"
    """Page-locked host memory."""
    HOST = "host"
    """Pageable host memory."""


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """``count`` tensors of ``each_bytes``."""

    where: Where
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
    """What the runtime reserves for ``plan``, once: it counts in the peaks of backward and forward as in the update's.

    One slab of page-locked memory, and states and gradients on the accelerator. ``param_bytes``: 2 for 16-bit models, 4
    for fp32. ``accumulates``: over micro-batches. Gradients are taken to be in the model's dtype, in which DeepSpeed
    accumulates them by default; where all is updated on the CPU, to be summed there: the runtime sums them on the
    accelerator if it finds room. ``publishes`` as in ``Widths``. ``params_on_host``: DeepSpeed offloads parameters from
    an accelerator with memory of its own, which stages the largest sub-group that it updates.

    ``longest_partition_numel`` as in ``staging_numel``; without it, the buffers for gradients on their way to host
    memory are left out. They need no room of their own: stock takes as much of the accelerator, see there.
    """
    widths = Widths(param=param_bytes, grad=param_bytes, publishes=publishes and not params_on_host)
    numels = _numels_by_placement(plan)
    streamed, residents = numels[Placement.STREAMED], numels[Placement.RESIDENT]
    kept = [*streamed, *residents]
    if accumulates and kept:
        # Sums stay there, too, for sub-groups that the CPU updates: there is room, see ``memory_of``.
        kept += numels[Placement.CPU]
    staging = []
    if publishes and longest_partition_numel is not None:
        staging = staging_buffers(plan, param_bytes, longest_partition_numel)
    return [
        Reservation(where=Where.PINNED, each_bytes=widths.slab_bytes(plan)),
        *states_on_accelerator(streamed, residents, plan.num_slots),
        *gradients_on_accelerator(kept, param_bytes),
        *(rounding_buffer(plan, param_bytes) if params_on_host else []),
        *staging,
    ]


def rounding_buffer(plan: UpdatePlan, param_bytes: int) -> list[Reservation]:
    """Return what an update on the accelerator rounds parameters of host memory into, before they are copied down."""
    each_bytes = plan.largest_on_accelerator * param_bytes
    return [Reservation(where=Where.ACCELERATOR, each_bytes=each_bytes)] if each_bytes else []


def staging_numel(plan: UpdatePlan, grad_bytes: int, longest_partition_numel: int) -> int:
    """Return the length of each of the ``NUM_STAGING_BUFFERS`` through which gradients go down to host memory.

    It is 0 if nothing goes down. ``longest_partition_numel`` is the length of the longest partition of one parameter.

    All of them together take ``grad_bytes * longest_partition_numel`` bytes, and at most 192 MiB. Stock takes that
    much, too: where the optimizer is offloaded, it keeps gradients in host memory, and brings each of them back up to
    take its norm, ``grad_bytes`` a parameter, beside the fp32 copy of 4 bytes a parameter that the norm is taken of
    (``stage3.py``, ``partition_grads``). The runtime takes the same norm of what was reduced, without the copy back
    up. Where that is less than 192 KiB, the buffers are 64 KiB each, or as long as the longest sub-group if that is
    less.
    """
    longest_sub_group = max(_numels_by_placement(plan)[Placement.CPU], default=0)
    share = longest_partition_numel // NUM_STAGING_BUFFERS
    smallest, largest = (
        size_bytes // grad_bytes for size_bytes in (SMALLEST_STAGING_BUFFER_BYTES, LARGEST_STAGING_BUFFER_BYTES)
    )
    return min(longest_sub_group, largest, max(smallest, share))


def staging_buffers(plan: UpdatePlan, grad_bytes: int, longest_partition_numel: int) -> list[Reservation]:
    """Return what ``staging_numel`` describes."""
    each_bytes = grad_bytes * staging_numel(plan, grad_bytes, longest_partition_numel)
    if each_bytes == 0:
        return []
    return [Reservation(where=Where.ACCELERATOR, each_bytes=each_bytes, count=NUM_STAGING_BUFFERS)]


def accelerator_bytes_with_all_gradients(plan: UpdatePlan, grad_bytes: int) -> int:
    """What is taken of the accelerator if all gradients, of ``grad_bytes`` a parameter, stay there, whatever is updated
    where."""
    numels = _numels_by_placement(plan)
    states = states_on_accelerator(numels[Placement.STREAMED], numels[Placement.RESIDENT], plan.num_slots)
    every = [sub_group.numel for sub_group in plan.workload.sub_groups]
    return cuda_bytes_of([*states, *gradients_on_accelerator(every, grad_bytes)])


def states_on_accelerator(streamed: Sequence[int], residents: Sequence[int], num_slots: int) -> list[Reservation]:
    """p, m and v in slots, and of residents; of sub-groups of these lengths."""
    num_slots = min(num_slots, len(streamed))
    lengths = {max(streamed, default=0): num_slots}
    for numel, count in Counter(residents).items():
        lengths[numel] = lengths.get(numel, 0) + count
    parts = STAGED_BYTES_PER_PARAM // FP32_BYTES
    return [
        Reservation(where=Where.ACCELERATOR, each_bytes=numel * FP32_BYTES, count=parts * count)
        for numel, count in lengths.items()
    ]


def gradients_on_accelerator(numels: Iterable[int], param_bytes: int) -> list[Reservation]:
    """Of sub-groups of these lengths."""
    return [
        Reservation(where=Where.ACCELERATOR, each_bytes=numel * param_bytes, count=count)
        for numel, count in Counter(numels).items()
    ]


def reserved_by_stock(plan: UpdatePlan, param_bytes: int) -> list[Reservation]:
    """What DeepSpeed's own optimizer reserves where ``plan`` streams nothing; residents are Twin-Flow's.

    fp32 states and gradients (``stage3.py``: ``fp32_partitioned_groups_flat``), and those that are summed over
    micro-batches (``grad_partitions_flat_buffer``). On the host they are pageable, unless
    ``offload_optimizer.pin_memory`` is set.
    """
    reservations = [Reservation(where=Where.HOST, each_bytes=plan.workload.numel * param_bytes)]
    for numel, placement, count in _sizes(plan):
        where = Where.ACCELERATOR if placement is Placement.RESIDENT else Where.HOST
        reservations.append(Reservation(where=where, each_bytes=numel * FP32_BYTES, count=4 * count))
    return reservations


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one rank; ``host_bytes`` includes the pinned ones."""

    gpu_bytes: int
    host_bytes: int
    pinned_bytes: int

    @classmethod
    def of(cls, reservations: Iterable[Reservation]) -> Memory:
        """As PyTorch's allocator of GPU memory serves them; the slab is locked as it is."""
        by_where: dict[Where, list[Reservation]] = {where: [] for where in Where}
        for reservation in reservations:
            by_where[reservation.where].append(reservation)
        pinned_bytes = sum(its.count * its.each_bytes for its in by_where[Where.PINNED])
        return cls(
            gpu_bytes=cuda_bytes_of(by_where[Where.ACCELERATOR]),
            host_bytes=pinned_bytes + sum(its.count * its.each_bytes for its in by_where[Where.HOST]),
            pinned_bytes=pinned_bytes,
        )


def memory_of(plan: UpdatePlan, param_bytes: int = 2) -> Memory:
    """All that the optimizer takes with ``plan`` at most: once something is updated on the accelerator, there is room
    for all gradients, as without offloading. On the CPU alone it is 2 bytes a parameter less."""
    return Memory.of(reserved_by_the_runtime(plan, param_bytes, accumulates=True))


def cuda_bytes_of(reservations: Iterable[Reservation]) -> int:
    """What ``CUDACachingAllocator`` takes from the device (``c10/cuda/CUDACachingAllocator.cpp``).

    Blocks are multiples of 512 B. Those up to 1 MiB share segments of 2 MiB, those below 10 MiB segments of 20 MiB;
    larger ones have their own, a multiple of 2 MiB. A segment holds whole blocks: a new one is taken when the last
    has no room for another.
    """
    taken_bytes = 0
    room_bytes = {2 * MIB: 0, 20 * MIB: 0}
    for its in reservations:
        block_bytes = _round_up(its.each_bytes, 512)
        if block_bytes >= 10 * MIB:
            taken_bytes += its.count * _round_up(block_bytes, 2 * MIB)
        elif block_bytes > 0:
            segment_bytes = 2 * MIB if block_bytes <= MIB else 20 * MIB
            in_the_last = min(its.count, room_bytes[segment_bytes] // block_bytes)
            room_bytes[segment_bytes] -= in_the_last * block_bytes
            if in_the_last < its.count:
                segments, rest = divmod(its.count - in_the_last - 1, segment_bytes // block_bytes)
                taken_bytes += (segments + 1) * segment_bytes
                room_bytes[segment_bytes] = segment_bytes - (rest + 1) * block_bytes
    return taken_bytes


def resident_bytes_of(numel: int) -> int:
    """What p, m and v of a resident of that length, or of a slot, take at least: whole blocks."""
    block_bytes = _round_up(numel * FP32_BYTES, 512)
    return 3 * (_round_up(block_bytes, 2 * MIB) if block_bytes >= 10 * MIB else block_bytes)


def _sizes(plan: UpdatePlan) -> Iterator[tuple[int, Placement, int]]:
    """Lengths of sub-groups by placement, and how many there are of each."""
    return ((numel, its, count) for (numel, its), count in Counter(_placed(plan)).items())


def _numels_by_placement(plan: UpdatePlan) -> dict[Placement, list[int]]:
    return {its: [numel for numel, placement in _placed(plan) if placement is its] for its in Placement}


def _placed(plan: UpdatePlan) -> Iterator[tuple[int, Placement]]:
    return ((its.numel, placement) for its, placement in zip(plan.workload.sub_groups, plan.placements, strict=True))


def _round_up(size_bytes: int, multiple: int) -> int:
    return -(-size_bytes // multiple) * multiple
