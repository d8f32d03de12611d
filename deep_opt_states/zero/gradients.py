"""The gradient of a parameter is the sum of what arrived for it since the last step, and zero if nothing did.

Stock departs from that when a parameter gets no gradient in some backward: at the step it reuses what the fp32
buffer held, which is the previous step's scaled gradient, and a sum over micro-batches continues the previous
window's. That is the one place where we do not follow stock to the bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from deep_opt_states.zero.compat import accumulated_grad, reduced_this_window, sees_gradients

Parameter = Any
"""A ``torch.nn.Parameter`` with ZeRO-3's attributes (``ds_id`` and others)."""


class Gradients:
    """Which ranges of the fp32 gradient buffers (``fp32_partitioned_groups_flat[i].grad``) hold what."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._written: dict[int, Parameter] = {}
        """Written since the last step, by backward or by the user."""
        self._stale: dict[int, Parameter] = {}
        """Written for an earlier step, and not since."""
        self._unscaled: dict[int, float] = {}
        """Our kernels only read gradients: these still lack the factor that stock multiplies in before Adam."""

    def wrote(self, params: Iterable[Parameter]) -> None:
        for param in params:
            self._written[param.ds_id] = param
            self._unscaled.pop(param.ds_id, None)

    def begin_accumulation(self, params: Iterable[Parameter]) -> None:
        """Stock adds, from the second micro-batch on: let a sum that starts late start from zero."""
        if self._optimizer.micro_step_id == 0:
            return
        for param in params:
            if sees_gradients(self._optimizer, param) and not reduced_this_window(self._optimizer, param):
                accumulated_grad(self._optimizer, param).zero_()

    def complete_window(self) -> None:
        """Before the norm: fill in the parameters that the last backward of the window did not reach."""
        optimizer = self._optimizer
        for group in optimizer.fp16_groups:
            for param in group:
                if param.ds_id not in self._written and reduced_this_window(optimizer, param):
                    total = accumulated_grad(optimizer, param)
                    # As stock does for windows that the user delimits: the norm is taken on the accelerator.
                    total = total.to(get_accelerator().current_device_name(), non_blocking=True)
                    optimizer._offload_grad_partition_at_boundary(param, total, {}, {})
        for ds_id, param in self._stale.items():
            if ds_id not in self._written:
                self._partition(param).zero_()
                # Stock's overflow scan reads the sums, too.
                accumulated_grad(optimizer, param).zero_()
                self._unscaled.pop(ds_id, None)
        self._stale = self._written
        self._written = {}

    def left_unscaled(self, sub_group_id: int, grad_scale: float) -> None:
        """The sub-group was updated with ``grad_scale``."""
        if grad_scale != 1.0:
            self._unscaled.update((param.ds_id, grad_scale) for param in self._optimizer.fp16_groups[sub_group_id])

    def settle(self, params: Iterable[Parameter]) -> None:
        """Before a reader: multiply in what stock's step would have."""
        for param in params:
            grad_scale = self._unscaled.pop(param.ds_id, None)
            if grad_scale is not None:
                self._partition(param).mul_(grad_scale)

    def _partition(self, param: Parameter) -> torch.Tensor:
        optimizer = self._optimizer
        sub_group_id, offset, numel = optimizer.grad_position[optimizer.get_param_id(param)]
        return optimizer.fp32_partitioned_groups_flat[sub_group_id].grad.narrow(0, offset, numel)
