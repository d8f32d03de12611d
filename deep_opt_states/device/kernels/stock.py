"""DeepSpeed's public CPU Adam op: what our kernels must equal, and what stands in for them where they cannot be had.

The op (``deepspeed/ops/csrc/includes/cpu_adam.h``) hides state in an object, see ``scalars.py``. Stock has one for
all sub-groups, updated in order. Here every sub-group has an object of its own, and each object hears the whole
sequence of steps and betas that stock's would hear; the calls for other sub-groups carry empty tensors. What an object
then computes does not depend on when it is called.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.op_builder import CPUAdamBuilder

from deep_opt_states.device.kernels.adam import AdamStep, AdamTensors, OneByOne, Part, zero


class StockAdam(OneByOne):
    """Three passes over host memory, holding the GIL in one of them; one op object a sub-group.

    ``betas`` are those that stock's object would be made with; what else it is made with, each step says anew. Raises
    what DeepSpeed raises where it cannot build its op, and ``RuntimeError`` for tensors that are not of one length.
    """

    def __init__(self, num_sub_groups: int, betas: tuple[float, float], *, adamw: bool) -> None:
        # Not by making a DeepSpeedCPUAdam, which asks the processor for its name in a process of its own: seconds.
        self._op = CPUAdamBuilder().load(verbose=False)
        self._betas = betas
        self._adamw = adamw
        self._empty = _fp32(0)
        self._num_sub_groups = num_sub_groups
        self._ids: list[int] = []
        self._scaled = _Scaled()
        weakref.finalize(self, _destroy, self._op, self._ids)
        self.restart()

    def restart(self) -> None:
        _destroy(self._op, self._ids)
        self._steps: Sequence[AdamStep] = ()
        self._runs: list[AdamStep] = []
        self._run_of = [0] * self._num_sub_groups
        self._ids.extend(self._create() for _ in range(self._num_sub_groups))

    def zero(self, tensors: AdamTensors) -> None:
        zero(tensors)

    def begin_step(self, steps: Sequence[AdamStep]) -> None:
        """Let every object hear what precedes its own update: the rest of the last step, the start of this one."""
        runs, run_of = _runs(steps)
        for sub_group, op_id in enumerate(self._ids):
            for step in (*self._runs[self._run_of[sub_group] + 1 :], *runs[: run_of[sub_group]]):
                self._call(op_id, step, self._empty, self._empty, self._empty, self._empty)
        self._steps, self._runs, self._run_of = steps, runs, run_of

    def update(self, sub_group: int, tensors: AdamTensors, part: Part | None = None) -> None:
        """Never a part: the op would give it a scalar tail of its own, where the sub-group has none."""
        assert part is None or part.numel == part.of, part
        step = self._steps[sub_group]
        grad = self.scaled_gradient(tensors.grad, step.grad_scale)
        self._call(self._ids[sub_group], step, tensors.master, grad, tensors.exp_avg, tensors.exp_avg_sq)
        if tensors.param is not None:
            tensors.param.copy_(tensors.master)

    def scaled_gradient(self, grad: torch.Tensor, grad_scale: float) -> torch.Tensor:
        """In fp32, which the op reads. Its memory is kept, so that no step but the first allocates."""
        return self._scaled.memory(grad.numel()).copy_(grad).mul_(grad_scale)

    def close(self) -> None:
        """Free the op objects, which DeepSpeed's module keeps for the life of the process otherwise, and the memory."""
        _destroy(self._op, self._ids)
        self._scaled = _Scaled()

    def _create(self) -> int:
        # DeepSpeed numbers its own objects from this counter; taking from it avoids a collision.
        op_id = DeepSpeedCPUAdam.optimizer_id
        DeepSpeedCPUAdam.optimizer_id += 1
        lr, eps, weight_decay, should_log = 1e-3, 1e-8, 0.0, False
        self._op.create_adam(op_id, lr, *self._betas, eps, weight_decay, self._adamw, should_log)
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


class _Scaled(threading.local):
    """Memory for a scaled gradient, of each thread's own: on the CPU accelerator slots and host memory are updated by
    one kernel, on two threads at once."""

    def __init__(self) -> None:
        self._memory = _fp32(0)

    def memory(self, numel: int) -> torch.Tensor:
        if self._memory.numel() < numel:
            self._memory = _fp32(numel)
        return self._memory.narrow(0, 0, numel)


def _fp32(numel: int) -> torch.Tensor:
    return torch.empty(numel, dtype=torch.float32, device="cpu")


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
