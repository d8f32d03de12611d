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


class AdamKernel(Protocol):
    def begin_step(self, steps: Sequence[AdamStep]) -> None:
        """Announce the updates of one step, one a sub-group in DeepSpeed's order, before the first of them."""

    def update(
        self,
        sub_group: int,
        step: AdamStep,
        master: torch.Tensor,
        grad: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
    ) -> None:
        """Update in place; all tensors fp32 of one shape [numel]. ``grad`` is left scaled."""
