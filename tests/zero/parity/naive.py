"""Rewrites that look right and are not: each must make a case of the suite fail, or the suite could not see it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from deepspeed import comm as dist

from deep_opt_states.device.kernels.adam import AdamStep
from deep_opt_states.device.kernels.cpu_adam import CPUAdam
from deep_opt_states.zero.gradients import Gradients
from deep_opt_states.zero.stage3 import DeepOptimizerStates_Stage3


def one_op_for_all(self: CPUAdam, steps: Sequence[AdamStep]) -> None:
    """One op object, called in the order of the schedule instead of stock's."""
    self._ids = [self._ids[0]] * len(self._ids)


def powers_by_pow(self: CPUAdam, steps: Sequence[AdamStep]) -> None:
    """beta^t computed afresh at each step, as the formula says."""
    for op_id, step in zip(self._ids, steps, strict=True):
        for other in (step.step + 7, step.step):
            self._op.adam_update(op_id, other, 0.0, step.beta1, step.beta2, 0.0, 0.0, True, *[self._empty] * 4)


original_call = CPUAdam._call


def in_two_parts(self: CPUAdam, op_id: int, step: AdamStep, *tensors: torch.Tensor) -> None:
    """The sub-group updated in two ranges, each with a scalar tail of its own."""
    middle = tensors[0].numel() // 2 + 1
    for part in (slice(0, middle), slice(middle, None)):
        original_call(self, op_id, step, *(tensor[part] for tensor in tensors))


def packed_norm(self: Any) -> list[torch.Tensor]:
    """The squares of all sub-groups all-reduced as one vector."""
    squares = torch.stack([
        sum((self.norm_for_param_grads.get(self.get_param_id(param), torch.zeros(())) ** 2 for param in group),
            torch.zeros((), dtype=torch.float64)).float()
        for group in self.fp16_groups
    ])  # fmt: skip
    dist.all_reduce(squares)
    return list(squares**0.5)


def keep_stale(self: Gradients) -> None:
    """Leaves a missing gradient as the last step left it."""
    self._written.clear()


NAIVE: dict[str, tuple[str, type, str, Callable[..., Any]]] = {
    "one op for all sub-groups": ("groups with betas a, b, a", CPUAdam, "begin_step", one_op_for_all),
    "beta^t by pow": ("beta powers over 60 steps", CPUAdam, "begin_step", powers_by_pow),
    "updated in two parts": ("every placement", CPUAdam, "_call", in_two_parts),
    "norms packed": ("3 ranks, clipping, two groups", DeepOptimizerStates_Stage3, "_get_norm_groups", packed_norm),
    "stale gradients": ("no gradient in some steps", Gradients, "complete_window", keep_stale),
}
"""By name: the case that must fail, and the method that is replaced."""


@contextmanager
def applied(name: str) -> Iterator[None]:
    _, owner, method, replacement = NAIVE[name]
    with mock.patch.object(owner, method, replacement):
        yield
