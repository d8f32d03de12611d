"""Update with DeepSpeed's public CPU Adam op: the reference for our kernels, and their fallback.

Stock's one op object hides state (``scalars.py``), so its results depend on the order of the updates. Here every
sub-group has its own object, which receives all steps and betas of stock's, with empty tensors for other sub-groups.
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

from deep_opt_states.device.kernels.adam import AdamKernel, AdamStep, AdamTensors, ElementRange


class StockAdam(AdamKernel):
    """DeepSpeed's op in three passes over host memory, of which one holds the GIL, with one op object per sub-group.

    ``betas`` must equal stock's. Raise DeepSpeed's error if it cannot build its op, or for tensors of other lengths.
    """

    def __init__(self, num_sub_groups: int, betas: tuple[float, float], *, adamw: bool) -> None:
        # A DeepSpeedCPUAdam would also start a process to find the processor's name, which takes seconds.
        self._op = CPUAdamBuilder().load(verbose=False)
        self._betas = betas
        self._adamw = adamw
        self._empty = _empty(0)
        self._num_sub_groups = num_sub_groups
        self._ids: list[int] = []
        self._scaled = threading.local()
        """Memory for a scaled gradient per thread: on the CPU accelerator, two threads update with one kernel."""
        weakref.finalize(self, _destroy, self._op, self._ids)
        self.restart()

    def restart(self) -> None:
        _destroy(self._op, self._ids)
        self._steps: Sequence[AdamStep] = ()
        self._runs: list[AdamStep] = []
        self._run_of = [0] * self._num_sub_groups
        self._ids.extend(self._create() for _ in range(self._num_sub_groups))

    def begin_step(self, steps: Sequence[AdamStep]) -> None:
        """Call each object for the steps before its own update: the rest of the last step and the start of this one."""
        runs, run_of = _runs(steps)
        for sub_group, op_id in enumerate(self._ids):
            for step in (*self._runs[self._run_of[sub_group] + 1 :], *runs[: run_of[sub_group]]):
                self._call(op_id, step, self._empty, self._empty, self._empty, self._empty)
        self._steps, self._runs, self._run_of = steps, runs, run_of

    def update(self, sub_group: int, tensors: AdamTensors, element_range: ElementRange | None = None) -> None:
        """Update the whole sub-group. The op would compute the end of a smaller range as a scalar tail."""
        assert element_range is None or element_range.numel == element_range.sub_group_numel, element_range
        step = self._steps[sub_group]
        grad = self.scaled_gradient(tensors.grad, step.grad_scale, tensors.master.dtype)
        self._call(self._ids[sub_group], step, tensors.master, grad, tensors.exp_avg, tensors.exp_avg_sq)
        if tensors.param is not None:
            tensors.param.copy_(tensors.master)

    def scaled_gradient(self, grad: torch.Tensor, grad_scale: float, dtype: torch.dtype) -> torch.Tensor:
        """Return the scaled gradient in ``dtype``, in memory that this thread's next call overwrites."""
        memory = getattr(self._scaled, "memory", self._empty)
        if memory.numel() < grad.numel() or memory.dtype != dtype:
            memory = self._scaled.memory = _empty(grad.numel(), dtype)
        return memory.narrow(0, 0, grad.numel()).copy_(grad).mul_(grad_scale)

    def close(self) -> None:
        """Free the memory, and the op objects, which DeepSpeed's module would keep until the process ends."""
        _destroy(self._op, self._ids)
        self._scaled = threading.local()

    def _create(self) -> int:
        # DeepSpeed's own objects take their numbers from the same counter.
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


def _empty(numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(numel, dtype=dtype, device="cpu")


def _destroy(op: Any, ids: list[int]) -> None:
    while ids:
        op.destroy_adam(ids.pop())


def _runs(steps: Sequence[AdamStep]) -> tuple[list[AdamStep], list[int]]:
    """Return the steps without repetitions after the first, which change nothing, and the index of each step there."""
    runs: list[AdamStep] = []
    run_of: list[int] = []
    for _, group in groupby(steps, key=lambda step: (step.step, step.beta1, step.beta2)):
        members = list(group)
        run_of.extend(len(runs) + min(index, 1) for index in range(len(members)))
        runs.extend(members[:2])
    return runs, run_of
