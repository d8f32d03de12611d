"""Rewrites of the plugin that look right but change bits. Each must make a case fail, or the suite would not notice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from deepspeed import comm as dist

from deep_opt_states.device.kernels.adam import AdamStep, ElementRange, RangeUpdate
from deep_opt_states.device.kernels.fused import FusedAdam
from deep_opt_states.device.kernels.scalars import BetaPowers, Scalars
from deep_opt_states.zero.stage3 import DeepOptimizerStates_Stage3
from deep_opt_states.zero.step.gradients import Gradients


def compute_powers_when_used(self: FusedAdam, steps: Sequence[AdamStep]) -> None:
    """Advance beta^t when each update runs: in the order of the schedule instead of stock's order."""
    self._scalars = ScalarsOnUse(self, steps)  # type: ignore[assignment]


@dataclass
class ScalarsOnUse:
    """The scalars of one step, each computed when its sub-group is updated."""

    adam: FusedAdam
    steps: Sequence[AdamStep]

    def __getitem__(self, sub_group: int) -> Scalars:
        return self.adam._powers.scalars([self.steps[sub_group]])[0]


def compute_powers_by_pow(self: FusedAdam, steps: Sequence[AdamStep]) -> None:
    """Compute beta^t anew in each step, as in the formula."""
    self._scalars = [BetaPowers((0.0, 0.0), adamw=self._adamw).scalars([step])[0] for step in steps]


def update_in_two_parts(self: FusedAdam, updates: Sequence[RangeUpdate]) -> None:
    """Update each range in two parts, as if each part were a sub-group with a vector tail of its own."""
    halves = []
    for update in updates:
        numel = update.tensors.master.numel()
        middle = numel // 2 + 1
        for begin, end in ((0, middle), (middle, numel)):
            half = update.tensors.narrow(ElementRange(begin=begin, end=end, sub_group_numel=numel))
            halves.append(replace(update, tensors=half, element_range=ElementRange.whole(end - begin)))
    update_ranges(self, halves)


update_ranges = FusedAdam.update_ranges


def all_reduce_one_vector(self: Any) -> list[torch.Tensor]:
    """Return the norms of the sub-groups, with all their squares all-reduced as one vector."""
    squares = torch.stack([
        sum((self.norm_for_param_grads.get(self.get_param_id(param), torch.zeros(())) ** 2 for param in group),
            torch.zeros((), dtype=torch.float64)).float()
        for group in self.fp16_groups
    ])  # fmt: skip
    dist.all_reduce(squares)
    return list(squares**0.5)


def keep_stale_gradients(self: Gradients) -> None:
    """Leave a missing gradient as the last step left it."""
    self._written.clear()


NAIVE: dict[str, tuple[str, type, str, Callable[..., Any]]] = {
    "beta^t in the order of the schedule": (
        "groups with betas a, b, a",
        FusedAdam,
        "begin_step",
        compute_powers_when_used,
    ),
    "beta^t by pow": ("beta powers over 60 steps", FusedAdam, "begin_step", compute_powers_by_pow),
    "updated in two parts": ("every placement", FusedAdam, "update_ranges", update_in_two_parts),
    "norms packed into one all-reduce": (
        "3 ranks, clipping, two groups",
        DeepOptimizerStates_Stage3,
        "_get_norm_groups",
        all_reduce_one_vector,
    ),
    "stale gradients": ("no gradient in some steps", Gradients, "complete_window", keep_stale_gradients),
}
"""The rewrites by name: the case that must fail, the class, the name of its method, and the method that replaces it."""


@contextmanager
def applied(name: str) -> Iterator[None]:
    """Apply the rewrite ``name`` inside this context."""
    _, owner, method, replacement = NAIVE[name]
    with mock.patch.object(owner, method, replacement):
        yield
