"""What a plan takes of accelerator, host and pinned memory, with the rounding of the allocators that serve it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

from perf_model.lowering import needed_slots
from perf_model.placement import Placement
from perf_model.plan import UpdatePlan
from perf_model.schedule import STAGED_BYTES_PER_PARAM

MIB = 2**20

FP32_BYTES = 4

RESIDENT_BYTES_PER_PARAM = 16
"""fp32 p, m, v and gradient."""


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


def reserved_by_the_runtime(plan: UpdatePlan, param_bytes: int) -> list[Reservation]:
    """The tensors that the runtime reserves for ``plan``, once. ``param_bytes``: 2 for 16-bit models, 4 for fp32."""
    num_slots, slot_numel = needed_slots(plan.workload, plan.placements, plan.num_slots)
    parts = STAGED_BYTES_PER_PARAM // FP32_BYTES
    reservations = [Reservation(where=Where.ACCELERATOR, each_bytes=slot_numel * FP32_BYTES, count=num_slots * parts)]
    for numel, placement, count in _sizes(plan):
        where = Where.ACCELERATOR if placement is Placement.RESIDENT else Where.PINNED
        states = Reservation(where=where, each_bytes=numel * FP32_BYTES, count=3 * count)
        reservations.append(states)
        if placement is Placement.CPU and param_bytes < FP32_BYTES:
            rounded = Reservation(where=Where.PINNED, each_bytes=numel * param_bytes, count=count)
            reservations.append(rounded)
    return reservations


def reserved_by_deepspeed(plan: UpdatePlan, param_bytes: int) -> list[Reservation]:
    """Gradients (``stage3.py``: ``fp32_partitioned_groups_flat[i].grad``, ``grad_partitions_flat_buffer``).

    Those on the host are pageable, as DeepSpeed has them unless ``offload_optimizer.pin_memory`` is set. A resident's
    are where its states are.
    """
    reservations = [Reservation(where=Where.HOST, each_bytes=plan.workload.numel * param_bytes)]
    for numel, placement, count in _sizes(plan):
        where = Where.ACCELERATOR if placement is Placement.RESIDENT else Where.HOST
        gradients = Reservation(where=where, each_bytes=numel * FP32_BYTES, count=count)
        reservations.append(gradients)
    return reservations


def reserved_by_stock(plan: UpdatePlan, param_bytes: int) -> list[Reservation]:
    """All that DeepSpeed's own optimizer reserves where ``plan`` streams nothing; residents are Twin-Flow's."""
    states = [
        Reservation(
            where=Where.ACCELERATOR if placement is Placement.RESIDENT else Where.HOST,
            each_bytes=numel * FP32_BYTES,
            count=3 * count,
        )
        for numel, placement, count in _sizes(plan)
    ]
    return [*states, *reserved_by_deepspeed(plan, param_bytes)]


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one rank; ``host_bytes`` includes the pinned ones."""

    gpu_bytes: int
    host_bytes: int
    pinned_bytes: int

    @classmethod
    def of(cls, reservations: Iterable[Reservation]) -> Memory:
        """As PyTorch's allocators serve them."""
        by_where: dict[Where, list[Reservation]] = {where: [] for where in Where}
        for reservation in reservations:
            by_where[reservation.where].append(reservation)
        pinned_bytes = sum(its.count * pinned_bytes_of(its.each_bytes) for its in by_where[Where.PINNED])
        return cls(
            gpu_bytes=cuda_bytes_of(by_where[Where.ACCELERATOR]),
            host_bytes=pinned_bytes + sum(its.count * its.each_bytes for its in by_where[Where.HOST]),
            pinned_bytes=pinned_bytes,
        )


def memory_of(plan: UpdatePlan, param_bytes: int = 2) -> Memory:
    """All that the optimizer takes with ``plan``, DeepSpeed's gradient buffers included."""
    return Memory.of([*reserved_by_the_runtime(plan, param_bytes), *reserved_by_deepspeed(plan, param_bytes)])


def pinned_bytes_of(requested_bytes: int) -> int:
    """``CachingHostAllocator`` rounds up to a power of two (``ATen/core/CachingHostAllocator.h``)."""
    return 0 if requested_bytes == 0 else 1 << (requested_bytes - 1).bit_length()


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
    """What a resident of that length takes at least, as does a slot: its p, m, v and gradient as whole blocks."""
    block_bytes = _round_up(numel * FP32_BYTES, 512)
    blocks = RESIDENT_BYTES_PER_PARAM // FP32_BYTES
    return blocks * (_round_up(block_bytes, 2 * MIB) if block_bytes >= 10 * MIB else block_bytes)


def _sizes(plan: UpdatePlan) -> Iterator[tuple[int, Placement, int]]:
    """Lengths of sub-groups by placement, and how many there are of each."""
    placed = list(zip(plan.workload.sub_groups, plan.placements, strict=True))
    for placement in Placement:
        counts = Counter(sub_group.numel for sub_group, its in placed if its is placement)
        for numel, count in counts.items():
            yield numel, placement, count


def _round_up(size_bytes: int, multiple: int) -> int:
    return -(-size_bytes // multiple) * multiple
