"""DeepSpeed's public CPU Adam op, free to be called in any order.

The op (``deepspeed/ops/csrc/includes/cpu_adam.h``, ``Adam_Optimizer::IncrementStep``) hides state: beta^t is a
running product while steps follow one another with the same betas, and ``pow`` after any other change. Stock
has one such object for all sub-groups, so its bits depend on the order of the calls. Here every sub-group has
an object of its own, and each object hears the whole sequence of steps and betas that stock's would hear; the
calls for other sub-groups carry empty tensors. What an object then computes does not depend on when it is called.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

from deep_opt_states.device.kernels.adam import AdamStep


class CPUAdam:
    """One op object a sub-group, made with the hyperparameters that ``optimizer`` made its own with.

    Raises ``RuntimeError`` (from the op) for tensors that are not fp32 of one length.
    """

    def __init__(self, optimizer: DeepSpeedCPUAdam, num_sub_groups: int) -> None:
        self._optimizer = optimizer
        self._op = optimizer.ds_opt_adam
        self._empty = torch.empty(0)
        self._ids: list[int] = []
        weakref.finalize(self, _destroy, self._op, self._ids)
        self.restart(num_sub_groups)

    def restart(self, num_sub_groups: int) -> None:
        """Forget every step heard, as a new process would have: beta^t is ``pow`` at the next step."""
        self.close()
        self._runs: list[AdamStep] = []
        self._run_of = [0] * num_sub_groups
        self._ids.extend(self._create() for _ in range(num_sub_groups))

    def begin_step(self, steps: Sequence[AdamStep]) -> None:
        """Let every object hear what precedes its own update: the rest of the last step, the start of this one."""
        runs, run_of = _runs(steps)
        for sub_group, op_id in enumerate(self._ids):
            for step in (*self._runs[self._run_of[sub_group] + 1 :], *runs[: run_of[sub_group]]):
                self._call(op_id, step, self._empty, self._empty, self._empty, self._empty)
        self._runs, self._run_of = runs, run_of

    def update(
        self,
        sub_group: int,
        step: AdamStep,
        master: torch.Tensor,
        grad: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
    ) -> None:
        # Multiplying by 1 changes no bit and costs a pass over the gradient.
        if step.grad_scale != 1.0:
            grad.mul_(step.grad_scale)
        self._call(self._ids[sub_group], step, master, grad, exp_avg, exp_avg_sq)

    def close(self) -> None:
        """Free the op objects; DeepSpeed's module keeps them for the life of the process otherwise."""
        _destroy(self._op, self._ids)

    def _create(self) -> int:
        # DeepSpeed numbers its own objects from this counter; taking from it avoids a collision.
        op_id = DeepSpeedCPUAdam.optimizer_id
        DeepSpeedCPUAdam.optimizer_id += 1
        defaults = self._optimizer.defaults
        self._op.create_adam(
            op_id,
            defaults["lr"],
            *defaults["betas"],
            defaults["eps"],
            defaults["weight_decay"],
            self._optimizer.adam_w_mode,
            False,
        )
        return op_id

    def _call(self, op_id: int, step: AdamStep, *tensors: torch.Tensor) -> None:
        self._op.adam_update(
            op_id,
            step.step,
            step.lr,
            step.beta1,
            step.beta2,
            step.eps,
            step.weight_decay,
            step.bias_correction,
            *tensors,
        )


def _destroy(op: Any, ids: list[int]) -> None:
    while ids:
        op.destroy_adam(ids.pop())


def _runs(steps: Sequence[AdamStep]) -> tuple[list[AdamStep], list[int]]:
    """The steps without neighbours that agree in step and betas (the op ignores those), and each one's run."""
    runs: list[AdamStep] = []
    run_of: list[int] = []
    for _, group in groupby(steps, key=lambda step: (step.step, step.beta1, step.beta2)):
        members = list(group)
        run_of.extend([len(runs)] * len(members))
        runs.append(members[0])
    return runs, run_of
