"""The one signature of every Adam kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(frozen=True, kw_only=True)
class AdamStep:
    """The numbers of one sub-group's update. ``step`` counts from 1; the gradient is multiplied by ``grad_scale``."""

    step: int
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    bias_correction: bool
    grad_scale: float


@dataclass(frozen=True, kw_only=True)
class Part:
    """Elements ``begin`` to ``end``, that one not included, of a sub-group of ``of`` elements."""

    begin: int
    end: int
    of: int

    @classmethod
    def whole(cls, numel: int) -> Part:
        return cls(begin=0, end=numel, of=numel)

    def __post_init__(self) -> None:
        assert 0 <= self.begin <= self.end <= self.of, self

    @property
    def numel(self) -> int:
        return self.end - self.begin

    def view(self, whole: torch.Tensor) -> torch.Tensor:
        """Shape [of] to shape [numel]."""
        # A schedule makes many views per action: none where the part is the whole saves most of what issuing costs.
        return whole if self.numel == self.of else whole.narrow(0, self.begin, self.numel)


@dataclass(frozen=True, kw_only=True)
class AdamTensors:
    """One sub-group's, or of a part of one, shape [numel] each, all in the memory that the kernel works on.

    ``master``, ``exp_avg`` and ``exp_avg_sq`` are fp32 and updated in place. ``grad`` is bf16, fp16 or fp32 and only
    read. ``param`` takes the updated parameters, rounded to its dtype; None where nobody needs them.
    """

    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    grad: torch.Tensor
    param: torch.Tensor | None

    def part(self, part: Part) -> AdamTensors:
        """Views."""
        return self.each(part.view)

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> AdamTensors:
        changed: dict[str, Any] = {name: None if its is None else change(its) for name, its in vars(self).items()}
        return AdamTensors(**changed)


@dataclass(frozen=True, kw_only=True)
class PartUpdate:
    """The update of one part of one sub-group; ``tensors`` are the part's."""

    sub_group: int
    tensors: AdamTensors
    part: Part


class AdamKernel(Protocol):
    """An Adam update whose results have the same bits on every device, except for which NaN they are.

    All kernels have NaN in the same places, but IEEE 754 leaves the sign and the payload of a NaN open. On x86, the
    C++ kernel has stock's in the states: an invalid operation gives 0xffc00000, and an operand's NaN is passed on. On a
    GPU every operation gives 0x7fffffff. Parameters rounded to bf16 have 0x7fc0 on both, where PyTorch's own
    conversion on the CPU has 0xffff in its vectors. Stock skips a step whose norm is NaN, and so do we: a NaN is
    updated only where the states or the parameters had it before.
    """

    def zero(self, tensors: AdamTensors) -> None:
        """All of it, on the threads that will update it: near these it comes to lie if nothing has touched it yet."""

    def begin_step(self, steps: Sequence[AdamStep]) -> None:
        """Announce the updates of one step, one a sub-group in DeepSpeed's order, before the first of them."""

    def update(self, sub_group: int, tensors: AdamTensors, part: Part | None = None) -> None:
        """As announced by ``begin_step``, in any order of the sub-groups and of their parts.

        ``tensors`` are the part's, or without one the whole sub-group's. An element's bits do not depend on the parts.
        """

    def update_parts(self, updates: Sequence[PartUpdate]) -> None:
        """Update parts of any sub-groups in one call, with the bits of ``update`` for each."""

    def restart(self) -> None:
        """Forget every step heard, as a new process would have: beta^t is ``pow`` at the next step."""

    def close(self) -> None:
        """Free what is not freed with the object."""


class OneByOne:
    """A base of kernels that update one part per call."""

    def update_parts(self: AdamKernel, updates: Sequence[PartUpdate]) -> None:
        for each in updates:
            self.update(each.sub_group, each.tensors, each.part)


def zero(tensors: AdamTensors) -> None:
    """By PyTorch, wherever they are."""
    for tensor in vars(tensors).values():
        if tensor is not None:
            tensor.zero_()
