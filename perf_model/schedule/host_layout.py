"""Lay out one rank's page-locked slab, sub-group by sub-group and tensor by tensor.

The layout does not depend on the plan, so that a later plan can move any unit. The slab is one allocation, because
PyTorch's allocator of pinned memory would round each tensor up to a power of two
(``ATen/core/CachingHostAllocator.h``).
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from perf_model.schedule.workload import FP32_BYTES, STATES, Workload

ALIGNMENT_BYTES = 64
"""The size of a cache line, which no two tensors share."""

PAGE_BYTES = mmap.PAGESIZE
"""The unit of memory mappings and of direct I/O on this machine. With states on disk, each tensor starts at a page."""

NUM_DISK_SLOTS = 3
"""One disk slot is read, one is updated, and one is written."""


class DiskBytes(NamedTuple):
    """The bytes of states on disk, and the host memory of each of ``num_slots`` disk slots."""

    on_disk: int
    each_slot: int
    num_slots: int


@dataclass(frozen=True, kw_only=True)
class Widths:
    """Bytes per element of parameters, gradients, master weights and each moment.

    ``publishes`` is false if the CPU writes the parameters of the model itself: if the accelerator shares host memory,
    or if DeepSpeed offloads parameters.
    """

    param: int
    grad: int
    master: int = FP32_BYTES
    moment: int = FP32_BYTES
    publishes: bool = True

    @property
    def of_states(self) -> dict[str, int]:
        return dict(zip(STATES, (self.master, self.moment, self.moment), strict=True))

    @property
    def states(self) -> int:
        """Return the bytes per parameter of all ``STATES``: 12 if they are fp32."""
        return sum(self.of_states.values())

    @property
    def rounds(self) -> bool:
        """Return whether parameters are rounded master weights. Otherwise, both are the same, as with bf16 masters."""
        return self.param < self.master

    @property
    def on_host(self) -> dict[str, int]:
        """Return the tensors of a sub-group, with bytes per element. Masters may be published without ``rounded``."""
        widths = {**self.of_states, "grad": self.grad}
        if self.publishes and self.rounds:
            widths["rounded"] = self.param
        return widths

    def slab_bytes(self, workload: Workload) -> int:
        """Return the addresses of one rank's slab, also for the states in it that are on disk."""
        alignment = PAGE_BYTES if workload.on_disk_numel else ALIGNMENT_BYTES
        widths = self.on_host.values()
        return sum(aligned(numel * width, alignment) for numel in workload.sub_group_numels for width in widths)

    def disk_bytes(self, workload: Workload) -> DiskBytes:
        # The planner asks for the same workload thousands of times.
        known: dict[Widths, DiskBytes] = workload.known_disk_bytes
        if self not in known:
            on_disk_bytes, slot_bytes = 0, Counter[int]()
            for run in runs_on_disk(workload, self):
                on_disk_bytes += run.size_bytes
                slot_bytes[run.unit] += run.slot_bytes
            num_slots = min(NUM_DISK_SLOTS, len(slot_bytes))
            known[self] = DiskBytes(on_disk_bytes, max(slot_bytes.values(), default=0), num_slots)
        return known[self]


SIXTEEN_BIT = Widths(param=2, grad=2)

WIDTHS_OF_STATES = {
    "fp32": SIXTEEN_BIT,
    "bf16-masters": replace(SIXTEEN_BIT, master=2),
    "bf16": replace(SIXTEEN_BIT, master=2, moment=2),
}
"""The bytes of each setting of DeepSpeed for the states of a 16-bit model: with ``bf16_master_weights_and_grads`` the
masters are bf16, and with ``bf16_optimizer_states`` also the moments."""

KEYS_OF_STATES = {
    "fp32": (),
    "bf16-masters": ("bf16_master_weights_and_grads",),
    "bf16": ("bf16_master_weights_and_grads", "bf16_optimizer_states"),
}
"""The keys of DeepSpeed's block ``bf16`` that are true for each of them."""


@dataclass(frozen=True, kw_only=True)
class SlabTensor:
    """A tensor of ``numel`` elements in the slab: one of ``STATES``, ``"grad"`` or ``"rounded"`` of a sub-group."""

    sub_group: int
    name: str
    offset_bytes: int
    numel: int


def slab_tensors(workload: Workload, widths: Widths) -> Iterator[SlabTensor]:
    offset_bytes, alignment = 0, PAGE_BYTES if workload.on_disk_numel else ALIGNMENT_BYTES
    for sub_group, numel in enumerate(workload.sub_group_numels):
        for name, width in widths.on_host.items():
            yield SlabTensor(sub_group=sub_group, name=name, offset_bytes=offset_bytes, numel=numel)
            offset_bytes += aligned(numel * width, alignment)


@dataclass(frozen=True, kw_only=True)
class DiskRun:
    """One state of one range of a unit on disk: the bytes of the slab from ``begin_bytes`` to ``end_bytes``.

    Only its whole pages are in the file, at the same offset as in the slab. The ``edges`` before and after them share
    pages with other states, and stay in host memory.
    """

    unit: int
    part: int
    name: str
    begin_bytes: int
    end_bytes: int

    @property
    def offset_bytes(self) -> int:
        return aligned(self.begin_bytes, PAGE_BYTES)

    @property
    def size_bytes(self) -> int:
        """Return the size of the whole pages, which may be 0."""
        return max(0, self.end_bytes // PAGE_BYTES * PAGE_BYTES - self.offset_bytes)

    @property
    def edges(self) -> list[tuple[int, int]]:
        """Return begin and end of the bytes that are not in the file."""
        if self.size_bytes == 0:
            return [(self.begin_bytes, self.end_bytes)]
        pages_end = self.offset_bytes + self.size_bytes
        edges = ((self.begin_bytes, self.offset_bytes), (pages_end, self.end_bytes))
        return [(begin, end) for begin, end in edges if begin < end]

    @property
    def slot_bytes(self) -> int:
        """Return the bytes of a disk slot for the state, which starts as far after a page as in the slab."""
        return aligned(self.end_bytes, PAGE_BYTES) - self.begin_bytes // PAGE_BYTES * PAGE_BYTES


def runs_on_disk(workload: Workload, widths: Widths) -> Iterator[DiskRun]:
    """Yield the states of all units on disk, with their places in the slab, in the order of disk slots."""
    tensors = {(tensor.sub_group, tensor.name): tensor for tensor in slab_tensors(workload, widths)}
    for unit in workload.units:
        if not unit.is_on_disk:
            continue
        for name, width in widths.of_states.items():
            for part, run in enumerate(unit.ranges):
                first = tensors[run.sub_group, name].offset_bytes
                begin_bytes, end_bytes = (first + element * width for element in (run.begin, run.end))
                yield DiskRun(unit=unit.index, part=part, name=name, begin_bytes=begin_bytes, end_bytes=end_bytes)


def aligned(size_bytes: int, alignment: int = ALIGNMENT_BYTES) -> int:
    """Return ``size_bytes`` rounded up to whole cache lines, or to multiples of ``alignment``."""
    return -(-size_bytes // alignment) * alignment
