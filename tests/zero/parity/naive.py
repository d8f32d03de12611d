"""Rewrites that look right and are not: each must make a case of the suite fail, or the suite could not see it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from deepspeed import comm as dist

from deep_opt_states.device.kernels.adam import AdamStep, Part, PartUpdate
from deep_opt_states.device.kernels.fused import FusedAdam
from deep_opt_states.device.kernels.scalars import BetaPowers, Scalars
from deep_opt_states.zero.stage3 import DeepOptimizerStates_Stage3
from deep_opt_states.zero.step.gradients import Gradients


def remember(self: FusedAdam, steps: Sequence[AdamStep]) -> None:
    """The tracker of beta^t hears of each update when it runs, in the order of the schedule instead of stock's."""
    self._scalars = Announced(self, steps)  # type: ignore[assignment]


@dataclass
class Announced:
    adam: FusedAdam
    steps: Sequence[AdamStep]

    def __getitem__(self, sub_group: int) -> Scalars:
        return self.adam._powers.scalars([self.steps[sub_group]])[0]


def powers_by_pow(self: FusedAdam, steps: Sequence[AdamStep]) -> None:
    """beta^t computed afresh at each step, as the formula says."""
    self._scalars = [BetaPowers((0.0, 0.0), adamw=self._adamw).scalars([step])[0] for step in steps]


def with_tails_of_their_own(self: FusedAdam, updates: Sequence[PartUpdate]) -> None:
    """Update each part in two, each as if it were a sub-group."""
    halves = []
    for each in updates:
        numel = each.tensors.master.numel()
        middle = numel // 2 + 1
        for begin, end in ((0, middle), (middle, numel)):
            half = each.tensors.part(Part(begin=begin, end=end, of=numel))
            halves.append(replace(each, tensors=half, part=Part.whole(end - begin)))
    update_parts(self, halves)


update_parts = FusedAdam.update_parts


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
    "beta^t in the order of the schedule": ("groups with betas a, b, a", FusedAdam, "begin_step", remember),
    "beta^t by pow": ("beta powers over 60 steps", FusedAdam, "begin_step", powers_by_pow),
    "updated in two parts": ("every placement", FusedAdam, "update_parts", with_tails_of_their_own),
    "norms packed": ("3 ranks, clipping, two groups", DeepOptimizerStates_Stage3, "_get_norm_groups", packed_norm),
    "stale gradients": ("no gradient in some steps", Gradients, "complete_window", keep_stale),
}
"""By name: the case that must fail, and the method that is replaced."""


@contextmanager
def applied(name: str) -> Iterator[None]:
    _, owner, method, replacement = NAIVE[name]
    with mock.patch.object(owner, method, replacement):
        yield
