"""An Adam kernel in plain torch operations, in place, for tests of what calls it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from deep_opt_states.device.kernels.adam import AdamStep


class PlainAdam:
    """AdamW by the formula (arXiv 1711.05101). ``begun`` holds the steps announced."""

    def __init__(self) -> None:
        self.begun: list[tuple[AdamStep, ...]] = []

    def begin_step(self, steps: Sequence[AdamStep]) -> None:
        self.begun.append(tuple(steps))

    def update(
        self,
        sub_group: int,
        step: AdamStep,
        master: torch.Tensor,
        grad: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
    ) -> None:
        grad.mul_(step.grad_scale)
        exp_avg.lerp_(grad, 1 - step.beta1)
        exp_avg_sq.mul_(step.beta2).addcmul_(grad, grad, value=1 - step.beta2)
        # The gradient is scratch from here on: no kernel that is called inside a step may allocate.
        torch.sqrt(exp_avg_sq, out=grad)
        grad.div_(math.sqrt(1 - step.beta2**step.step)).add_(step.eps)
        master.mul_(1 - step.lr * step.weight_decay)
        master.addcdiv_(exp_avg, grad, value=-step.lr / (1 - step.beta1**step.step))


def adam_step(step: int, grad_scale: float = 0.5) -> AdamStep:
    return AdamStep(
        step=step,
        lr=1e-2,
        beta1=0.9,
        beta2=0.99,
        eps=1e-8,
        weight_decay=0.1,
        bias_correction=True,
        grad_scale=grad_scale,
    )
