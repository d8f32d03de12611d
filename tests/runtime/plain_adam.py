"""Update with Adam in plain torch operations, as a test double of the kernels for tests of their callers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from deep_opt_states.device.kernels.adam import AdamKernel, AdamStep, AdamTensors, ElementRange


class PlainAdam(AdamKernel):
    """AdamW by the formula (arXiv 1711.05101)."""

    _steps: tuple[AdamStep, ...] = ()

    def begin_step(self, steps: Sequence[AdamStep]) -> None:
        self._steps = tuple(steps)

    def update(self, sub_group: int, tensors: AdamTensors, element_range: ElementRange | None = None) -> None:
        step = self._steps[sub_group]
        master, exp_avg, exp_avg_sq = tensors.master, tensors.exp_avg, tensors.exp_avg_sq
        grad = tensors.grad.float() * step.grad_scale
        exp_avg.lerp_(grad.to(exp_avg.dtype), 1 - step.beta1)
        exp_avg_sq.mul_(step.beta2).addcmul_(grad, grad, value=1 - step.beta2)
        denominator = exp_avg_sq.sqrt() / math.sqrt(1 - step.beta2**step.step) + step.eps
        master.mul_(1 - step.lr * step.weight_decay)
        master.addcdiv_(exp_avg, denominator, value=-step.lr / (1 - step.beta1**step.step))
        if tensors.param is not None:
            tensors.param.copy_(master)

    def restart(self) -> None:
        self._steps = ()


def adam_step(step: int, grad_scale: float = 0.5) -> AdamStep:
    fixed = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1, "bias_correction": True}
    return AdamStep(step=step, grad_scale=grad_scale, **fixed)
