"""Lay out one rank's page-locked slab: sub-group by sub-group, with one part for each tensor in host memory.

One allocation is registered with the driver once. PyTorch's caching allocator of pinned memory would round each tensor
up to a power of two (``ATen/core/CachingHostAllocator.h``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import FP32_BYTES, STATES

ALIGNMENT_BYTES = 64
"""The size of a cache line: vectors are aligned, and no two tensors share a line."""


@dataclass(frozen=True, kw_only=True)
class Widths:
    """Bytes per element of the parameters and of the gradients.

    They are 2, or 4 for the parameters of an fp32 model and for gradients that are accumulated in fp32. ``publishes``
    is false if the CPU writes the parameters of the model itself, because the accelerator shares host memory or because
    DeepSpeed offloads parameters.
    """

    param: int
    grad: int
    publishes: bool = True

    def on_host(self, placement: Placement) -> dict[str, int]:
        """Return the tensors that a sub-group has in host memory, with their bytes per element.

        A resident sub-group has none. A CPU sub-group also has its gradient and, if they are published, the rounded
        parameters; parameters that are fp32 are published from ``master``.
        """
        if placement is Placement.RESIDENT:
            return {}
        widths = dict.fromkeys(STATES, FP32_BYTES)
        if placement is Placement.CPU:
            widths["grad"] = self.grad
            if self.publishes and self.param < FP32_BYTES:
                widths["rounded"] = self.param
        return widths

    def slab_bytes(self, plan: UpdatePlan) -> int:
        """Return the size of one rank's slab."""
        return sum(self.host_bytes(plan, placement) for placement in Placement)

    def host_bytes(self, plan: UpdatePlan, placement: Placement) -> int:
        """Return the bytes of one rank's slab that the sub-groups with that placement take."""
        placed = zip(plan.workload.sub_groups, plan.placements, strict=True)
        numels = Counter(sub_group.numel for sub_group, candidate in placed if candidate is placement)
        return sum(
            count * _aligned(numel * width)
            for numel, count in numels.items()
            for width in self.on_host(placement).values()
        )


@dataclass(frozen=True, kw_only=True)
class SlabTensor:
    """A tensor of ``numel`` elements in the slab: one of ``STATES``, ``"grad"`` or ``"rounded"`` of a sub-group."""

    sub_group: int
    name: str
    offset_bytes: int
    numel: int


def slab_tensors(plan: UpdatePlan, widths: Widths) -> Iterator[SlabTensor]:
    """Yield the tensors in the slab of ``plan`` in order, each aligned to ``ALIGNMENT_BYTES``."""
    offset_bytes = 0
    for index, (sub_group, placement) in enumerate(zip(plan.workload.sub_groups, plan.placements, strict=True)):
        for name, width in widths.on_host(placement).items():
            yield SlabTensor(sub_group=index, name=name, offset_bytes=offset_bytes, numel=sub_group.numel)
            offset_bytes += _aligned(sub_group.numel * width)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
