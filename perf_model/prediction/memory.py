"""Compute the memory that a plan needs, rounded as the allocators round it, and compare it with budgets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from enum import Enum

from perf_model.schedule.host_layout import Widths
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import FP32_BYTES, STATES
from perf_model.units import DIGITS, GB, size

MIB = 2**20

GPU_MARGIN_BYTES = 2 * GB
"""The GPU memory that training leaves free by default when it fills the GPU with states."""

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


SIXTEEN_BIT = Widths(param=2, grad=2)
"""The widths of a 16-bit model whose gradients have its dtype."""


@dataclass(frozen=True, kw_only=True)
class TrainingSetup:
    """The facts about a training run, besides the plan, that the memory of the optimizer depends on.

    ``accumulates``: gradients are accumulated over several micro-batches. ``sums_on_accelerator``: whether their sums
    are on the accelerator also for units that the CPU updates. None if that is not decided yet: the planner assumes it
    for all plans that update anything on the accelerator. ``params_on_host``: DeepSpeed offloads parameters from an
    accelerator that has its own memory. ``longest_partition_numel`` is the length of the longest partition of one
    parameter; without it, the buffers for gradients on their way to host memory are left out.
    """

    widths: Widths = SIXTEEN_BIT
    accumulates: bool = False
    sums_on_accelerator: bool | None = None
    params_on_host: bool = False
    longest_partition_numel: int | None = None

    def keeps_sums(self, *, updates_on_accelerator: bool) -> bool:
        """Return whether the sums of accumulated gradients are on the accelerator also for units of the CPU.

        ``updates_on_accelerator``: the plan updates anything there.
        """
        return updates_on_accelerator if self.sums_on_accelerator is None else self.sums_on_accelerator


DEFAULT_SETUP = TrainingSetup()
"""A 16-bit model with gradients in its dtype, one micro-batch per step, and its parameters on the accelerator."""


def reserved_by_the_runtime(plan: UpdatePlan, setup: TrainingSetup) -> list[Reservation]:
    """Return the memory that the runtime reserves for ``plan``.

    It is reserved once, so it counts in the peaks of backward and forward as well as in that of the update. It consists
    of one slab of page-locked memory, and of states, gradients and buffers on the accelerator.

    The states are those of resident units, and of streamed units in the slots. Without accumulation, only the gradients
    of streamed and resident units are on the accelerator. With accumulation, those of all units are, if they fit into
    the budget (``TrainingSetup.sums_on_accelerator``); otherwise the others are accumulated in host memory.

    Memory that stock takes as well is not included: parameters, those that are gathered, gradients until they are
    reduced, and DeepSpeed's buckets.
    """
    on_cpu, streamed, residents = (plan.lengths[placement] for placement in Placement)
    updated = streamed + residents
    keeps_sums = setup.accumulates and setup.keeps_sums(updates_on_accelerator=bool(updated))
    states = Counter({max(streamed, default=0): min(plan.num_slots, streamed.total())}) + residents
    tensors = [
        *((numel * FP32_BYTES, len(STATES) * count) for numel, count in states.items()),
        *((numel * setup.widths.grad, count) for numel, count in (updated + on_cpu if keeps_sums else updated).items()),
    ]
    if updated and setup.params_on_host:
        # The parameters that an update on the accelerator works on, before they are copied.
        tensors.append((max(updated) * setup.widths.param, 1))
    return [
        Reservation(kind=MemoryKind.PINNED, each_bytes=setup.widths.slab_bytes(plan.workload)),
        *(
            Reservation(kind=MemoryKind.ACCELERATOR, each_bytes=each_bytes, count=count)
            for each_bytes, count in tensors
        ),
        *staging_buffers(plan, setup),
    ]


def staging_numel(plan: UpdatePlan, grad_bytes: int, longest_partition_numel: int) -> int:
    """Return the length of each of the ``NUM_STAGING_BUFFERS`` through which gradients are copied to host memory.

    It is 0 if no gradient is copied. ``longest_partition_numel`` is the length of the longest partition of one
    parameter.

    All buffers together take ``grad_bytes * longest_partition_numel`` bytes, and at most 192 MiB. If that is less than
    192 KiB, the buffers are 64 KiB each, or as long as the longest unit if that is less.

    Stock takes that much, too: with an offloaded optimizer it keeps gradients in host memory and copies each of them
    back to the accelerator to compute its norm. That takes ``grad_bytes`` per parameter, in addition to the fp32 copy
    of 4 bytes per parameter whose norm it computes (``stage3.py``, ``partition_grads``). The runtime computes the same
    norm from the reduced gradient, without the copy back.
    """
    longest_unit = max(plan.lengths[Placement.CPU], default=0)
    share = longest_partition_numel // NUM_STAGING_BUFFERS
    smallest, largest = (
        size_bytes // grad_bytes for size_bytes in (SMALLEST_STAGING_BUFFER_BYTES, LARGEST_STAGING_BUFFER_BYTES)
    )
    return min(longest_unit, largest, max(smallest, share))


def staging_buffers(plan: UpdatePlan, setup: TrainingSetup) -> list[Reservation]:
    """Return the buffers that ``staging_numel`` describes, and those that persistent parameters are published through.

    There are none if the accelerator shares host memory.
    """
    shares_host_memory = not setup.widths.publishes and not setup.params_on_host
    if setup.longest_partition_numel is None or shares_host_memory:
        return []
    buffers = []
    if each_bytes := setup.widths.grad * staging_numel(plan, setup.widths.grad, setup.longest_partition_numel):
        buffers.append(Reservation(kind=MemoryKind.ACCELERATOR, each_bytes=each_bytes, count=NUM_STAGING_BUFFERS))
    if (unit := plan.workload.persistent_unit) is not None and setup.widths.publishes:
        packed_bytes = plan.workload.units[unit].length * setup.widths.param
        kinds = (MemoryKind.ACCELERATOR, MemoryKind.PINNED)
        buffers += [Reservation(kind=kind, each_bytes=packed_bytes) for kind in kinds]
    return buffers


def reserved_by_stock(plan: UpdatePlan, param_bytes: int) -> list[Reservation]:
    """Return the memory that DeepSpeed's own optimizer reserves for ``plan``, which streams nothing.

    Resident units are those that Twin-Flow keeps on the accelerator. DeepSpeed reserves fp32 states and gradients
    (``stage3.py``: ``fp32_partitioned_groups_flat``), and the gradients that it accumulates over micro-batches
    (``grad_partitions_flat_buffer``). In host memory they are pageable, unless ``offload_optimizer.pin_memory`` is set.
    """
    reservations = [Reservation(kind=MemoryKind.HOST, each_bytes=plan.workload.numel * param_bytes)]
    for placement, numels in plan.lengths.items():
        kind = MemoryKind.ACCELERATOR if placement is Placement.RESIDENT else MemoryKind.HOST
        for numel, count in numels.items():
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


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """Bytes that the optimizer of one rank may take; None is unlimited. ``host_bytes`` includes the pinned bytes."""

    gpu_bytes: int | None = None
    host_bytes: int | None = None
    pinned_bytes: int | None = None

    def with_gpu_margin(self, margin_bytes: int, required_bytes: int) -> Budgets:
        """Return the budgets of a planner that leaves ``margin_bytes`` of the GPU memory free, as training does.

        ``required_bytes`` is the GPU memory of the units that rules by name place there. They may use the margin.
        """
        if self.gpu_bytes is None:
            return self
        return replace(self, gpu_bytes=min(self.gpu_bytes, max(0, required_bytes, self.gpu_bytes - margin_bytes)))

    def missing(self, memory: MemoryUse) -> dict[str, int]:
        """Return, for each budget that ``memory`` exceeds, the excess in bytes; empty if ``memory`` fits."""
        limits = {field.name: getattr(self, field.name) for field in fields(self)}
        excess = {name: getattr(memory, name) - limit for name, limit in limits.items() if limit is not None}
        return {name: excess_bytes for name, excess_bytes in excess.items() if excess_bytes > 0}


class DoesNotFit(ValueError):
    """The error if no plan fits. ``missing`` are the bytes, by budget, by which the nearest plan exceeds them."""

    def __init__(self, missing: dict[str, int], remedy: str = "Use more ranks.") -> None:
        self.missing = missing
        self.rule = f"Nothing fits: the nearest plan exceeds {excess_of(missing)}."
        super().__init__(f"{self.rule}\n{remedy}")


def excess_of(missing: dict[str, int]) -> str:
    """Return by how much the memory of each rank exceeds the budgets ``missing``."""
    return " and ".join(
        f"{name.removesuffix('_bytes')} memory by {size(excess, DIGITS)} per rank" for name, excess in missing.items()
    )


def memory_of(plan: UpdatePlan, setup: TrainingSetup = DEFAULT_SETUP) -> MemoryUse:
    """Return the most memory that the optimizer needs with ``plan``: see ``reserved_by_the_runtime``.

    GPU memory is that of whole segments of PyTorch's allocator. What is free in the last ones, up to 22 MiB, is counted
    although other tensors may use it. Staging buffers for gradients are not counted where stock takes as much for the
    gradients of the longest partition (``staging_numel``), because the training run needs that memory without the
    runtime, too.
    """
    reserved = reserved_by_the_runtime(plan, setup)
    if staging := staging_buffers(plan, setup):
        taken_bytes = sum(buffer.count * buffer.each_bytes for buffer in staging)
        if taken_bytes <= setup.widths.grad * (setup.longest_partition_numel or 0):
            reserved = reserved[: -len(staging)]
    return MemoryUse.from_reservations(reserved)


def cuda_bytes_of(reservations: Iterable[Reservation]) -> int:
    """Return the bytes that ``CUDACachingAllocator`` takes from the device for ``reservations``.

    Blocks are multiples of 512 B. Blocks up to 1 MiB share segments of 2 MiB, and blocks below 10 MiB share segments of
    20 MiB. Each larger block has its own segment, a multiple of 2 MiB. A segment holds whole blocks: the allocator
    takes a new segment when the last one has no space for another block (``c10/cuda/CUDACachingAllocator.cpp``).
    """
    taken_bytes = 0
    free_bytes = {2 * MIB: 0, 20 * MIB: 0}
    for tensors in reservations:
        block_bytes = block_bytes_of(tensors.each_bytes)
        if has_its_own_segment(tensors.each_bytes):
            taken_bytes += tensors.count * block_bytes
        elif block_bytes > 0:
            segment_bytes = 2 * MIB if block_bytes <= MIB else 20 * MIB
            in_the_last = min(tensors.count, free_bytes[segment_bytes] // block_bytes)
            free_bytes[segment_bytes] -= in_the_last * block_bytes
            if in_the_last < tensors.count:
                segments, rest = divmod(tensors.count - in_the_last - 1, segment_bytes // block_bytes)
                taken_bytes += (segments + 1) * segment_bytes
                free_bytes[segment_bytes] = segment_bytes - (rest + 1) * block_bytes
    return taken_bytes


def block_bytes_of(size_bytes: int) -> int:
    """Return the bytes of the blocks of a tensor: the least that the tensor takes of the accelerator's memory."""
    return _round_up(size_bytes, 2 * MIB if has_its_own_segment(size_bytes) else 512)


def has_its_own_segment(size_bytes: int) -> bool:
    """Return whether the allocator takes a segment of the device's memory for a tensor of that size alone."""
    return size_bytes > 10 * MIB - 512


def resident_bytes_of(numel: int) -> int:
    """Return the least bytes that p, m and v of that length take, in a slot or resident."""
    return len(STATES) * block_bytes_of(numel * FP32_BYTES)


def _round_up(size_bytes: int, multiple: int) -> int:
    return -(-size_bytes // multiple) * multiple
