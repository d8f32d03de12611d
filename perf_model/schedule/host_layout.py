"""How one rank's page-locked slab is laid out: sub-group by sub-group, a part for each tensor in host memory.

One allocation is registered once. PyTorch's caching allocator of pinned memory would round each tensor up to a power
of two (``ATen/core/CachingHostAllocator.h``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan

FP32_BYTES = 4

ALIGNMENT_BYTES = 64
"""A cache line: vectors are aligned, and no two tensors share one."""

STATES = ("master", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class Widths:
    """Bytes of an element: 2, or 4 for the parameters of an fp32 model and for gradients accumulated in fp32.

    ``publishes``: not where the CPU writes the model's own parameters, because the accelerator shares host memory or
    because DeepSpeed offloads parameters.
    """

    param: int
    grad: int
    publishes: bool = True

    def on_host(self, placement: Placement) -> dict[str, int]:
        """The tensors of a sub-group in host memory: none of a resident; of what the CPU updates its gradient, too, and
        the rounded parameters to publish; those that are fp32 are published from ``master``."""
        if placement is Placement.RESIDENT:
            return {}
        widths = dict.fromkeys(STATES, FP32_BYTES)
        if placement is Placement.CPU:
            widths["grad"] = self.grad
            if self.publishes and self.param < FP32_BYTES:
                widths["rounded"] = self.param
        return widths

    def slab_bytes(self, plan: UpdatePlan) -> int:
        """Of one rank."""
        return sum(self.host_bytes(plan, placement) for placement in Placement)

    def host_bytes(self, plan: UpdatePlan, placement: Placement) -> int:
        """Return what the sub-groups with that placement take of one rank's slab."""
        placed = zip(plan.workload.sub_groups, plan.placements, strict=True)
        numels = Counter(sub_group.numel for sub_group, its in placed if its is placement)
        return sum(
            count * _aligned(numel * width)
            for numel, count in numels.items()
            for width in self.on_host(placement).values()
        )


@dataclass(frozen=True, kw_only=True)
class Part:
    """A tensor of ``numel`` elements."""

    sub_group: int
    name: str
    offset_bytes: int
    numel: int


def parts_of(plan: UpdatePlan, widths: Widths) -> Iterator[Part]:
    """In the slab of ``plan``, in order, each aligned to ``ALIGNMENT_BYTES``."""
    offset_bytes = 0
    for index, (sub_group, placement) in enumerate(zip(plan.workload.sub_groups, plan.placements, strict=True)):
        for name, width in widths.on_host(placement).items():
            yield Part(sub_group=index, name=name, offset_bytes=offset_bytes, numel=sub_group.numel)
            offset_bytes += _aligned(sub_group.numel * width)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
