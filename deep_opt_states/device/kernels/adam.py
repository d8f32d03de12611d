"""The one signature of every Adam kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

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
class AdamTensors:
    """One sub-group's, shape [numel] each, all in the memory that the kernel works on.

    ``master``, ``exp_avg`` and ``exp_avg_sq`` are fp32 and updated in place. ``grad`` is bf16, fp16 or fp32 and only
    read. ``param`` takes the updated parameters, rounded to its dtype; None where nobody needs them.
    """

    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    grad: torch.Tensor
    param: torch.Tensor | None


class AdamKernel(Protocol):
    def zero(self, tensors: AdamTensors) -> None:
        """All of it, on the threads that will update it: near these it comes to lie if nothing has touched it yet."""

    def begin_step(self, steps: Sequence[AdamStep]) -> None:
        """Announce the updates of one step, one a sub-group in DeepSpeed's order, before the first of them."""

    def update(self, sub_group: int, tensors: AdamTensors) -> None:
        """As announced by ``begin_step``, in any order of the sub-groups."""

    def restart(self) -> None:
        """Forget every step heard, as a new process would have: beta^t is ``pow`` at the next step."""

    def close(self) -> None:
        """Free what is not freed with the object."""


def zero(tensors: AdamTensors) -> None:
    """By PyTorch, wherever they are."""
    for tensor in vars(tensors).values():
        if tensor is not None:
            tensor.zero_()
