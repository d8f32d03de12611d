"""Check that training has the bits of stock: masters, moments, step counts, 16-bit parameters, losses and norms.

These tests train on the CPU accelerator: ``make test`` the short list ``ON_CPU``, ``make test-all`` every case. All of
``QUICK`` trains on the GPU in software in ``make test`` (``software_gpu/training/test_parity_on_device.py``).
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from functools import partial
from io import StringIO
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed import comm as dist

from deep_opt_states.device.kernels import library
from deep_opt_states.device.kernels.adam import AdamStep, ElementRange, RangeUpdate
from deep_opt_states.device.kernels.fused import FusedAdam
from deep_opt_states.device.kernels.scalars import BetaPowers
from deep_opt_states.zero.stage3 import DeepOptimizerStates_Stage3
from deep_opt_states.zero.step.eager import MOST_IN_VAIN
from deep_opt_states.zero.step.gradients import Gradients
from tests.ranks import on_ranks, once, ranks
from tests.tiers import thorough
from tests.zero.parity.case import CPU, STREAMED, STRIDE_2, Case
from tests.zero.parity.cases import BASE_GROUP, CASES, DEPARTURES, ON_CPU, TWO_BETAS
from tests.zero.parity.training import (
    Result,
    assert_same_bits,
    differences,
    results_in_turn,
    run_variant,
    same_as_stock,
    same_as_zero_gradients,
)

BY_NAME = {case.name: case for case in (*CASES, *DEPARTURES)}
STOCK, OURS = "DeepSpeedZeroOptimizer_Stage3", "DeepOptimizerStates_Stage3"


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
    return dict(results_in_turn(work.items()))


def is_thorough(case: Case) -> bool:
    """Return whether only ``make test-all`` trains the case on the CPU accelerator."""
    return case not in ON_CPU


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


@pytest.mark.P1
@pytest.mark.P2
@pytest.mark.P4
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


def compute_powers_when_used(self: FusedAdam, steps: Sequence[AdamStep]) -> None:
    """Advance beta^t when each update runs: in the order of the schedule instead of stock's order."""
    self._scalars = mock.MagicMock()
    self._scalars.__getitem__.side_effect = lambda sub_group: self._powers.scalars([steps[sub_group]])[0]


def compute_powers_by_pow(self: FusedAdam, steps: Sequence[AdamStep]) -> None:
    """Compute beta^t anew in each step, as in the formula."""
    self._scalars = [BetaPowers((0.0, 0.0), adamw=self._adamw).scalars([step])[0] for step in steps]


update_ranges, complete_window = FusedAdam.update_ranges, Gradients.complete_window


def update_in_two_parts(self: FusedAdam, updates: Sequence[RangeUpdate]) -> None:
    """Update each range in two parts, as if each part were a sub-group with a vector tail of its own."""
    for update in updates:
        numel = update.tensors.master.numel()
        middle = numel // 2 + 1
        for begin, end in ((0, middle), (middle, numel)):
            half = update.tensors.narrow(ElementRange(begin=begin, end=end, sub_group_numel=numel))
            update_ranges(self, [replace(update, tensors=half, element_range=ElementRange.whole(end - begin))])


def all_reduce_one_vector(self: Any) -> list[torch.Tensor]:
    """Return the norms of the sub-groups, with all their squares all-reduced as one vector."""
    norms, zero = self.norm_for_param_grads, torch.zeros((), dtype=torch.float64)
    groups = [[norms.get(self.get_param_id(param), zero) for param in group] for group in self.fp16_groups]
    squares = torch.stack([sum((norm.double() ** 2 for norm in group), zero).float() for group in groups])
    dist.all_reduce(squares)
    return list(squares**0.5)


def keep_stale_gradients(self: Gradients) -> None:
    """Leave a missing gradient as the last step left it."""
    self._stale.clear()
    complete_window(self)


NAIVE: list[tuple[type, str, Callable[..., Any]]] = [
    (FusedAdam, "begin_step", compute_powers_when_used),
    (FusedAdam, "begin_step", compute_powers_by_pow),
    (FusedAdam, "update_ranges", update_in_two_parts),
    (Gradients, "complete_window", keep_stale_gradients),
    (DeepOptimizerStates_Stage3, "_get_norm_groups", all_reduce_one_vector),
]
"""The class, the name of its method, and the method that replaces it. The last one differs only on several ranks."""


@ranks(1, thorough(3))
def test_every_naive_rewrite_changes_bits() -> None:
    groups, skips = (*TWO_BETAS, BASE_GROUP), frozenset({3, 4, 6})
    case = Case(name="naive", blocks=(), steps=30, groups=groups, sometimes=True, skips_sometimes=skips)
    naive = NAIVE[:-1]
    if dist.get_world_size() == 3:
        case, naive = BY_NAME["3 ranks, clipping, two groups"], NAIVE[-1:]
    stock = run_variant(replace(case, zero_instead_of_skip=True), None)
    assert not differences(stock, run_variant(case, STRIDE_2))
    for owner, method, replacement in naive:
        with mock.patch.object(owner, method, replacement):
            found = differences(stock, run_variant(case, STRIDE_2))
        assert found, replacement.__name__


@contextmanager
def without_compiler() -> Iterator[None]:
    """Make every compilation of the C++ kernel fail inside this context."""
    # DeepSpeed has loaded its own op already, so that the empty folder and the bad flag do not affect it.
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, TORCH_EXTENSIONS_DIR=folder),
        mock.patch.object(library, "FLAGS", [*library.FLAGS, "-fno-such-flag"]),
    ):
        yield


@pytest.mark.P1
@pytest.mark.P6
# Not forked: the fork server has loaded the compiled kernel already.
@ranks(2, fresh=True)
def test_without_a_compiler_the_fallback_to_deepspeeds_op_has_the_bits_of_stock_and_logs_its_reason() -> None:
    """Let the last rank fall back. The ranks must agree: otherwise they would call different collectives."""
    case = Case(name="fallback", blocks=(CPU, STREAMED, STRIDE_2), steps=4, clip=0.5)
    stock = run_variant(case, None)
    falls_back = dist.get_rank() == dist.get_world_size() - 1
    with redirect_stdout(StringIO()) as output, without_compiler() if falls_back else nullcontext():
        for block in case.blocks:
            ours = run_variant(case, block)
            assert ours.optimizer_class == OURS
            assert_same_bits(stock, ours)
            assert ours.deferred == 0, "the fallback cannot update ranges, so no update may be deferred"
    lines = output.getvalue().splitlines()
    starts = [number for number, line in enumerate(lines) if "The C++ Adam kernel cannot be compiled" in line]
    assert len(starts) == (len(case.blocks) if falls_back else 0), "once per engine"
    for start in starts:
        reason, remedy, fallback = lines[start : start + 3]
        assert "-fno-such-flag" in reason
        assert len(reason) < 500, "only the line of ninja's output that states the error"
        assert "It needs a C++ compiler" in remedy
        assert "fall back to DeepSpeedCPUAdam" in fallback
