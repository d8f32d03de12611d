"""Compute the memory that a plan needs, rounded as the allocators round it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields
from enum import Enum

from perf_model.schedule.host_layout import SIXTEEN_BIT, Widths, aligned
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan, least_plan
from perf_model.schedule.workload import Workload
from perf_model.units import DIGITS, GB, counted, size

MIB = 2**20

GPU_MARGIN_BYTES = 2 * GB

NUM_STAGING_BUFFERS = 3
"""The buffers for gradients on their way to the host: one is filled, one is copied down, one is free."""

STAGING_BUFFER_BYTES = (64 * 2**10, 64 * MIB)
"""The bounds of a staging buffer. A link reaches full speed with the larger one. Less than the smaller one saves
nothing, because PyTorch takes small blocks from the device in segments of 2 MiB."""


class MemoryKind(Enum):
    ACCELERATOR = "accelerator"
    PINNED = "pinned"
    HOST = "host"
    SHADOW = "shadow"
    """Host memory of the second versions of eager units."""


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """``count`` tensors of ``each_bytes`` each."""

    kind: MemoryKind
    each_bytes: int
    count: int = 1


@dataclass(frozen=True, kw_only=True)
class TrainingSetup:
    """The facts about a training run, besides the plan, that the memory of the optimizer depends on.

    ``accumulates``: gradients are accumulated over several micro-batches. ``sums_on_accelerator``: their sums are on
    the accelerator also for units of the CPU. It defaults to the choice of the plan. ``params_on_host``: DeepSpeed
    offloads parameters from an accelerator with its own memory. Without ``longest_partition_numel``, there are no
    staging buffers.
    """

    widths: Widths = SIXTEEN_BIT
    accumulates: bool = False
    sums_on_accelerator: bool | None = None
    params_on_host: bool = False
    longest_partition_numel: int | None = None

    def keeps_sums(self, *, updates_on_accelerator: bool) -> bool:
        """Return whether the accelerator keeps the sums of CPU units: by default, if the plan updates others there."""
        return updates_on_accelerator if self.sums_on_accelerator is None else self.sums_on_accelerator

    def eligible_as_eager(self, plan: UpdatePlan) -> frozenset[int]:
        """Return the units of ``plan`` that may be eager: no streamed ones if the GPU writes parameters on the host."""
        streamed = {unit for unit, placement in enumerate(plan.placements) if placement is Placement.STREAMED}
        return plan.eligible_as_eager - streamed if self.params_on_host else plan.eligible_as_eager


DEFAULT_SETUP = TrainingSetup()
"""A 16-bit model on the accelerator, with gradients in its dtype and one micro-batch per step."""


def reserved_by_the_runtime(plan: UpdatePlan, setup: TrainingSetup) -> list[Reservation]:
    """Return the memory that the runtime reserves once for ``plan``, for all phases of training.

    Without accumulation, only the gradients of streamed and resident units are on the accelerator. Memory that stock
    also takes is not included: parameters, gradients until they are reduced, and DeepSpeed's buckets.
    """
    on_cpu, streamed, residents = (plan.lengths[placement] for placement in Placement)
    updated = streamed + residents
    keeps_sums = setup.accumulates and setup.keeps_sums(updates_on_accelerator=bool(updated))
    states = Counter({max(streamed, default=0): min(plan.num_slots, streamed.total())}) + residents
    tensors = [
        *((numel * width, count) for numel, count in states.items() for width in setup.widths.of_states.values()),
        *((numel * setup.widths.grad, count) for numel, count in (updated + on_cpu if keeps_sums else updated).items()),
    ]
    if updated and setup.params_on_host:
        tensors.append((max(updated) * setup.widths.param, 1))
    if any(plan.placements[unit] is Placement.STREAMED for unit in plan.eager):
        tensors.append((max(streamed) * setup.widths.param, min(plan.num_slots, streamed.total())))
    eager_bytes = shadow_bytes(setup.widths) * plan.eager_numel
    slab_bytes, disk = setup.widths.slab_bytes(plan.workload), setup.widths.disk_bytes(plan.workload)
    return [
        Reservation(kind=MemoryKind.PINNED, each_bytes=slab_bytes - disk.on_disk),
        Reservation(kind=MemoryKind.PINNED, each_bytes=disk.each_slot, count=disk.num_slots),
        *([Reservation(kind=MemoryKind.SHADOW, each_bytes=eager_bytes)] if eager_bytes else []),
        *(Reservation(kind=MemoryKind.ACCELERATOR, each_bytes=each, count=count) for each, count in tensors),
        *staging_buffers(plan, setup),
    ]


def shadow_bytes(widths: Widths) -> int:
    """Return the host memory per parameter of an eager unit: the second version of its states."""
    # If neither masters nor rounded parameters of the slab can be published, an eager unit needs its own parameters.
    return widths.states + (widths.param if widths.rounds and not widths.publishes else 0)


def staging_numel(plan: UpdatePlan, grad_bytes: int, longest_partition_numel: int) -> int:
    """Return the length of each of the ``NUM_STAGING_BUFFERS`` through which gradients are copied, 0 if none are.

    All buffers together are as long as the longest partition of one parameter. Each is within ``STAGING_BUFFER_BYTES``
    and not longer than the longest unit of the CPU. Stock takes as much memory: it copies each offloaded gradient back
    to the accelerator for its norm (``stage3.py``, ``partition_grads``).
    """
    smallest, largest = (size_bytes // grad_bytes for size_bytes in STAGING_BUFFER_BYTES)
    longest_unit = max(plan.lengths[Placement.CPU], default=0)
    return min(longest_unit, largest, max(smallest, longest_partition_numel // NUM_STAGING_BUFFERS))


def staging_buffers(plan: UpdatePlan, setup: TrainingSetup) -> list[Reservation]:
    """Return the buffers of ``staging_numel`` and of persistent parameters, none if host memory is shared."""
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


def reserved_by_stock(plan: UpdatePlan, widths: Widths = SIXTEEN_BIT) -> list[Reservation]:
    """Return the memory that DeepSpeed's own optimizer reserves for ``plan``, which streams nothing.

    Resident units are those that Twin-Flow keeps on the accelerator. DeepSpeed reserves states and gradients in the
    dtype of the masters (``stage3.py``, ``fp32_partitioned_groups_flat``) and the accumulated gradients
    (``grad_partitions_flat_buffer``). Host memory is pageable, unless ``offload_optimizer.pin_memory`` is set.
    """
    reservations = [Reservation(kind=MemoryKind.HOST, each_bytes=plan.workload.numel * widths.param)]
    for placement, numels in plan.lengths.items():
        kind = MemoryKind.ACCELERATOR if placement is Placement.RESIDENT else MemoryKind.HOST
        for numel, count in numels.items():
            for width in (*widths.of_states.values(), widths.master):
                reservations.append(Reservation(kind=kind, each_bytes=numel * width, count=count))
    return reservations


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """The bytes that one rank needs. ``host_bytes`` includes ``pinned_bytes`` and the ``eager_bytes`` of shadows."""

    gpu_bytes: int
    host_bytes: int
    pinned_bytes: int
    eager_bytes: int = 0

    @classmethod
    def from_reservations(cls, reservations: Iterable[Reservation]) -> MemoryUse:
        """Return the sums of ``reservations``, with GPU memory rounded as PyTorch's allocator rounds it."""
        reservations = list(reservations)
        taken = _bytes_by_kind(reservations)
        return cls(
            gpu_bytes=cuda_bytes_of(each for each in reservations if each.kind is MemoryKind.ACCELERATOR),
            host_bytes=taken[MemoryKind.PINNED] + taken[MemoryKind.HOST] + taken[MemoryKind.SHADOW],
            pinned_bytes=taken[MemoryKind.PINNED],
            eager_bytes=taken[MemoryKind.SHADOW],
        )


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """The bytes that the optimizer of one rank may take, None if unlimited, as in ``MemoryUse``."""

    gpu_bytes: int | None = None
    host_bytes: int | None = None
    pinned_bytes: int | None = None
    eager_bytes: int = 0

    def eager_numel(self, widths: Widths) -> float:
        return self.eager_bytes / shadow_bytes(widths)

    def missing(self, memory: MemoryUse) -> dict[str, int]:
        """Return the excess of ``memory`` in bytes for each budget that it exceeds."""
        limits = {field.name: getattr(self, field.name) for field in fields(self)}
        excess = {name: getattr(memory, name) - limit for name, limit in limits.items() if limit is not None}
        return {name: excess_bytes for name, excess_bytes in excess.items() if excess_bytes > 0}


class DoesNotFit(ValueError):
    """The error if no plan fits. ``missing`` contains the excess in bytes of the nearest plan, by budget."""

    def __init__(self, missing: dict[str, int], remedy: str = "Use more ranks.") -> None:
        self.missing = missing
        self.rule = f"Nothing fits: the nearest plan exceeds {excess_of(missing)}."
        super().__init__(f"{self.rule}\n{remedy}")


def excess_of(missing: dict[str, int]) -> str:
    """Return in words by how much the memory of each rank exceeds its budgets."""
    return " and ".join(
        f"{name.removesuffix('_bytes').replace('gpu', 'GPU')} memory by {size(excess, DIGITS)} per rank"
        for name, excess in missing.items()
    )


def memory_of(plan: UpdatePlan, setup: TrainingSetup = DEFAULT_SETUP) -> MemoryUse:
    """Return the most memory that the optimizer needs with ``plan``, in whole segments of PyTorch's allocator."""
    reserved = reserved_by_the_runtime(plan, setup)
    # Staging buffers are not counted if stock takes as much for gradients (``staging_numel``).
    if staging := staging_buffers(plan, setup):
        taken_bytes = sum(buffer.count * buffer.each_bytes for buffer in staging)
        if taken_bytes <= setup.widths.grad * (setup.longest_partition_numel or 0):
            reserved = reserved[: -len(staging)]
    return MemoryUse.from_reservations(reserved)


def cuda_bytes_of(reservations: Iterable[Reservation]) -> int:
    """Return the bytes that PyTorch takes from the device (``c10/cuda/CUDACachingAllocator.cpp``).

    Blocks are multiples of 512 B. Blocks of up to 1 MiB share segments of 2 MiB, and those below 10 MiB share segments
    of 20 MiB. Each larger block has its own segment, a multiple of 2 MiB. A segment contains whole blocks.
    """
    taken_bytes = 0
    free_bytes = {2 * MIB: 0, 20 * MIB: 0}
    for tensors in reservations:
        if tensors.each_bytes > 10 * MIB - 512:
            taken_bytes += tensors.count * aligned(tensors.each_bytes, 2 * MIB)
        elif tensors.each_bytes > 0:
            block_bytes = aligned(tensors.each_bytes, 512)
            segment_bytes = 2 * MIB if block_bytes <= MIB else 20 * MIB
            in_the_last = min(tensors.count, free_bytes[segment_bytes] // block_bytes)
            free_bytes[segment_bytes] -= in_the_last * block_bytes
            if in_the_last < tensors.count:
                segments, rest = divmod(tensors.count - in_the_last - 1, segment_bytes // block_bytes)
                taken_bytes += (segments + 1) * segment_bytes
                free_bytes[segment_bytes] = segment_bytes - (rest + 1) * block_bytes
    return taken_bytes


def summary_by_placement(plan: UpdatePlan, widths: Widths) -> list[str]:
    """Return one line per placement, with the bytes of one rank."""
    lines = []
    for placement in Placement:
        numel, count, schedule = plan.numel(placement), plan.placements.count(placement), plan.schedule
        if count == 0:
            continue
        line = f"{placement.value}: {counted(count, 'unit')}, {numel:,} parameters, "
        on_disk_numel = plan.workload.on_disk_numel if placement is Placement.CPU else 0
        host_bytes = sum(widths.on_host.values()) * numel - widths.states * on_disk_numel
        line += f"{size(host_bytes)} of host memory"
        if on_disk_numel:
            line += f", states of {on_disk_numel:,} parameters, {size(widths.states * on_disk_numel)}, on disk"
        if placement is Placement.STREAMED:
            slot = size((widths.states + (widths.param if schedule.adopts else 0)) * schedule.slot_numel)
            line += f", on the accelerator {counted(schedule.num_slots, 'slot')} of {slot}"
        elif placement is Placement.RESIDENT:
            line += f", on the accelerator {size(widths.states * numel)} of states"
        if placement is not Placement.CPU:
            line += f" and {size(widths.grad * numel)} of gradients"
        placed = (unit for unit in plan.eager if plan.placements[unit] is placement)
        if eager_numel := sum(plan.workload.units[unit].numel for unit in placed):
            line += f"; {eager_numel:,} of them eager, with {size(shadow_bytes(widths) * eager_numel)} more"
        lines.append(line)
    return lines


def total_reserved(reservations: Iterable[Reservation]) -> str:
    """Return the bytes that one rank has reserved, by kind of memory."""
    taken = _bytes_by_kind(reservations)
    on_accelerator = size(taken[MemoryKind.ACCELERATOR])
    return f"{size(taken[MemoryKind.PINNED])} of host memory, {on_accelerator} on the accelerator"


def _bytes_by_kind(reservations: Iterable[Reservation]) -> Counter[MemoryKind]:
    taken = Counter[MemoryKind]()
    for reservation in reservations:
        taken[reservation.kind] += reservation.count * reservation.each_bytes
    return taken


def require_memory(
    workload: Workload, placements: Collection[Placement], budgets: Budgets, setup: TrainingSetup
) -> None:
    """Raise ``DoesNotFit`` if no plan fits, and ``ValueError`` if the machine cannot update a fixed unit."""
    for unit in workload.units:
        if unit.fixed is not None and unit.fixed not in placements:
            raise ValueError(
                f"{unit.fixed.value} needs a rate of Adam on the accelerator, found none: {unit.label}.\n"
                f"The profile has the reason at gpu_adam_params_per_s. Find what is missing: deep-opt-states doctor. "
                f"Measure without other load on the machine: deep-opt-states profile."
            )
    least = least_plan(workload)
    if missing := budgets.missing(memory_of(least, setup)):
        fixed = {placement.value for placement in least.placements if placement is not Placement.CPU}
        remedy = f"Let fewer units be {' or '.join(sorted(fixed))}, or use more ranks." if fixed else "Use more ranks."
        raise DoesNotFit(missing, remedy)
