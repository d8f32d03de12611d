"""Lay out one rank's page-locked slab, sub-group by sub-group and tensor by tensor.

The layout does not depend on the plan, so that a later plan can move any unit. The slab is one allocation, because
PyTorch's allocator of pinned memory would round each tensor up to a power of two
(``ATen/core/CachingHostAllocator.h``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from perf_model.schedule.workload import FP32_BYTES, STATES, Workload

ALIGNMENT_BYTES = 64
"""The size of a cache line, which no two tensors share."""


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
        """Return the bytes per element of each of ``STATES``."""
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
        """Return the size of one rank's slab."""
        return sum(aligned(numel * width) for numel in workload.sub_group_numels for width in self.on_host.values())


SIXTEEN_BIT = Widths(param=2, grad=2)

WIDTHS_OF_STATES = {
    "fp32": SIXTEEN_BIT,
    "bf16-masters": replace(SIXTEEN_BIT, master=2),
    "bf16": replace(SIXTEEN_BIT, master=2, moment=2),
}
"""The bytes of each setting of DeepSpeed for the states of a 16-bit model: with ``bf16_master_weights_and_grads`` the
masters are bf16, and with ``bf16_optimizer_states`` the moments, too."""

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
    """Yield the tensors in the slab in order."""
    offset_bytes = 0
    for sub_group, numel in enumerate(workload.sub_group_numels):
        for name, width in widths.on_host.items():
            yield SlabTensor(sub_group=sub_group, name=name, offset_bytes=offset_bytes, numel=numel)
            offset_bytes += aligned(numel * width)


def aligned(size_bytes: int) -> int:
    """Return ``size_bytes`` rounded up to whole cache lines."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
