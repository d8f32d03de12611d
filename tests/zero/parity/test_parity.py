"""Check that training has the bits of stock: masters, moments, step counts, 16-bit parameters, losses and norms.

These tests train on the CPU accelerator: ``make test`` the short list ``ON_CPU``, ``make test-all`` every case. All of
``QUICK`` trains on the GPU in software in ``make test`` (``software_gpu/training/test_parity_on_device.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed import comm as dist

from deep_opt_states.device.kernels.adam import AdamStep, ElementRange, RangeUpdate
from deep_opt_states.device.kernels.fused import FusedAdam
from deep_opt_states.device.kernels.scalars import BetaPowers, Scalars
from deep_opt_states.zero.stage3 import DeepOptimizerStates_Stage3
from deep_opt_states.zero.step.eager import MOST_IN_VAIN
from deep_opt_states.zero.step.gradients import Gradients
from tests.ranks import on_ranks, once
from tests.zero.parity.case import Case
from tests.zero.parity.case_runs import (
    Result,
    result,
    results_in_turn,
    same_as_stock,
    same_as_zero_gradients,
)
from tests.zero.parity.cases import CASES, DEPARTURES, ON_CPU
from tests.zero.parity.training import run_variant

BY_NAME = {case.name: case for case in (*CASES, *DEPARTURES)}
STOCK, OURS = "DeepSpeedZeroOptimizer_Stage3", "DeepOptimizerStates_Stage3"


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


@once
def trained(world_size: int, thorough: bool) -> list[dict[str, Result]]:
    """Return the results by name of each rank; one process trains many cases.

    Several ranks are fresh: they hash strings differently, as under a user's launcher, so that an order that depends on
    it would differ. One rank has no other to differ from. Four run the code of two, and would import it for 30 s.
    """
    return on_ranks(world_size, train_cases, thorough, timeout_s=400, fresh=world_size in (2, 3))


def train_cases(thorough: bool) -> dict[str, Result]:
    cases = [case for case in BY_NAME.values() if case.world_size == torch.distributed.get_world_size()]
    names = {case.name for case in cases if is_thorough(case) == thorough}
    work: dict[str, Callable[[], Result]] = {}
    work |= {case.name: partial(same_as_stock, case) for case in CASES if case.name in names}
    work |= {case.name: partial(same_as_zero_gradients, case) for case in DEPARTURES if case.name in names}
    work |= {name: partial(naive, name) for name, (case, *_) in NAIVE.items() if case in names}
    return dict(results_in_turn(work.items()))


def is_thorough(case: Case) -> bool:
    """Return whether only ``make test-all`` trains the case on the CPU accelerator."""
    return case not in ON_CPU


def naive(name: str) -> Result:
    """Train the case of a naive rewrite with it."""
    case_name, owner, method, replacement = NAIVE[name]
    case = BY_NAME[case_name]
    stock = run_variant(replace(case, zero_instead_of_skip=True), None)
    with mock.patch.object(owner, method, replacement):
        return result(stock, {"naive": run_variant(case, case.blocks[0])})


def results_of(case: Case, name: str) -> list[Result]:
    """Return the result that has this name, of the ranks that train ``case``."""
    results = [by_name[name] for by_name in trained(case.world_size, is_thorough(case)) if name in by_name]
    assert len(results) == case.world_size, "an earlier case failed"
    for found in results:
        assert "error" not in found, found["error"]
    return results


def grouped(name: str, case: Case) -> Any:
    """Return a test parameter such that one worker of pytest-xdist trains all cases of a world size and tier."""
    tier = [pytest.mark.thorough] if is_thorough(case) else []
    group = f"parity on {case.world_size}{', thorough' if is_thorough(case) else ''}"
    return pytest.param(name, id=name, marks=[*tier, pytest.mark.xdist_group(group)])


@pytest.mark.promise("P1", "P2", "P4")
@pytest.mark.parametrize("name", [grouped(case.name, case) for case in CASES])
def test_training_in_every_placement_and_setting_has_the_bits_of_stock(name: str) -> None:
    case = BY_NAME[name]
    for rank, found in enumerate(results_of(case, name)):
        assert found["stock class"] == STOCK
        for variant, unequal in found["differences"].items():
            assert found["classes"][variant] == (STOCK if variant.endswith("to stock") else OURS)
            assert unequal == [], f"rank {rank}, {variant}"
            forwards, units = found["deferred"][variant]
            if variant.endswith("to stock") or "'overlap_forward': False" in variant:
                assert forwards == 0, variant
            else:
                assert forwards >= (case.steps - len(case.poisoned)) // 2, f"{variant}: too few deferred updates"
                assert units >= min(2, len(found["numbers"]["step"])), f"{variant}: forward waited for too few units"
            if "'eager': True" in variant and not (variant.endswith("to stock") or case.caller_accumulates):
                check_speculations(case, found["numbers"]["norm"], *found["speculations"][variant])
        numbers = found["numbers"]
        assert (len(numbers["step"]) >= 4) == (case.sub_group_size < 10**9), "a case must have several sub-groups"
        if case.schedule and case.steps > 5:
            assert len(set(numbers["lr"])) > len({group.lr for group in case.groups})
        assert len(set(numbers["lr"][-len(case.groups) :])) == len({group.lr for group in case.groups})
        if case.clip:
            assert any(case.clip < norm < float("inf") for norm in numbers["norm"]), numbers["norm"]
        if not case.resume:
            assert numbers["skipped"][-1] >= len(case.poisoned)


def check_speculations(case: Case, norms: list[float], kept: int, void: int) -> None:
    """Check that steps of eager units were speculated, and were in vain exactly if the step was another one."""
    unlikely = [norm for norm in norms if not norm <= (case.clip or math.inf)]
    assert kept + void > 0
    assert kept > 0 or len(unlikely) > MOST_IN_VAIN
    assert void > 0 or not unlikely


@pytest.mark.parametrize("name", [grouped(case.name, case) for case in DEPARTURES])
def test_a_missing_gradient_is_zero_where_stock_reuses_the_last_one(name: str) -> None:
    """Check the departure from stock. When stock no longer differs, the departure is obsolete."""
    for rank, found in enumerate(results_of(BY_NAME[name], name)):
        for variant, unequal in found["differences"].items():
            assert unequal == [], f"rank {rank}, {variant}"
        assert found["stock differs"], f"rank {rank}"


@pytest.mark.parametrize("name", [grouped(name, BY_NAME[case]) for name, (case, *_) in NAIVE.items()])
def test_every_naive_rewrite_changes_bits_in_some_case(name: str) -> None:
    assert any(found["differences"]["naive"] for found in results_of(BY_NAME[NAIVE[name][0]], name))
