"""Lay out one rank's page-locked slab, sub-group by sub-group and tensor by tensor.

The layout does not depend on the plan, so that a later plan can move any unit. The slab is one allocation, because
PyTorch's allocator of pinned memory would round each tensor up to a power of two
(``ATen/core/CachingHostAllocator.h``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from perf_model.schedule.workload import FP32_BYTES, STATES, Workload

ALIGNMENT_BYTES = 64
"""The size of a cache line, which no two tensors share."""


@dataclass(frozen=True, kw_only=True)
class Widths:
    """Bytes per element of parameters and gradients.

    ``publishes`` is false if the CPU writes the parameters of the model itself: if the accelerator shares host memory,
    or if DeepSpeed offloads parameters.
    """

    param: int
    grad: int
    publishes: bool = True

    @property
    def on_host(self) -> dict[str, int]:
        """Return the tensors of a sub-group, with bytes per element. Fp32 parameters need no ``rounded``."""
        widths = {**dict.fromkeys(STATES, FP32_BYTES), "grad": self.grad}
        if self.publishes and self.param < FP32_BYTES:
            widths["rounded"] = self.param
        return widths

    def slab_bytes(self, workload: Workload) -> int:
        """Return the size of one rank's slab."""
        return sum(aligned(numel * width) for numel in workload.sub_group_numels for width in self.on_host.values())


@dataclass(frozen=True, kw_only=True)
class SlabTensor:
    """A tensor of ``numel`` elements in the slab: one of ``STATES``, ``"grad"`` or ``"rounded"`` of a sub-group."""

    sub_group: int
    name: str
    offset_bytes: int
    numel: int


def slab_tensors(workload: Workload, widths: Widths) -> Iterator[SlabTensor]:
    """Yield the tensors in the slab in order."""
    offset_bytes = 0
    for sub_group, numel in enumerate(workload.sub_group_numels):
        for name, width in widths.on_host.items():
            yield SlabTensor(sub_group=sub_group, name=name, offset_bytes=offset_bytes, numel=numel)
            offset_bytes += aligned(numel * width)


def aligned(size_bytes: int) -> int:
    """Return ``size_bytes`` rounded up to whole cache lines."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
