"""Check that training is bit-identical to stock: masters, moments, step counts, 16-bit parameters, losses and norms.

These tests train on the CPU accelerator: ``make test`` the short list ``ON_CPU``, ``make test-all`` every case. All of
``QUICK`` trains on the GPU in software in ``make test`` (``software_gpu/training/test_parity_on_device.py``).
"""

from __future__ import annotations

import math
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from io import StringIO
from unittest import mock

import pytest
import torch.distributed as dist

from deep_opt_states.device.kernels import library
from deep_opt_states.device.kernels.library import KernelUnavailable
from deep_opt_states.zero.step.eager import MOST_IN_VAIN
from tests.ranks import on_ranks, ranks
from tests.tiers import thorough
from tests.zero.parity.case import CPU, STREAMED, STRIDE_2, Case
from tests.zero.parity.cases import CASES, DEPARTURES, ON_CPU
from tests.zero.parity.training import assert_same_bits, differences, run_variant, same_as_stock

STOCK, OURS = "DeepSpeedZeroOptimizer_Stage3", "DeepOptimizerStates_Stage3"


@pytest.mark.P1
@pytest.mark.P2
@pytest.mark.P4
@pytest.mark.parametrize("tier", ["quick", thorough("all others")])
@pytest.mark.parametrize("world_size", [1, 2, thorough(3), thorough(4)])
def test_training_in_every_placement_and_setting_is_bit_identical_to_stock(world_size: int, tier: str) -> None:
    """Train on fresh ranks if there are several: they hash strings differently, as under a user's launcher."""
    on_ranks(world_size, train_cases, tier, timeout_s=400, fresh=world_size == 2)


def train_cases(tier: str) -> None:
    world_size = dist.get_world_size()
    for case in CASES:
        if case.world_size == min(world_size, 2) and (case in ON_CPU) == (tier == "quick"):
            train_case(replace(case, world_size=world_size))


def train_case(case: Case) -> None:
    found = same_as_stock(case)
    assert found["stock class"] == STOCK
    for variant, unequal in found["differences"].items():
        label = f"{case.name}, {variant}"
        assert found["classes"][variant] == (STOCK if variant.endswith("to stock") else OURS)
        assert unequal == [], label
        forwards = found["deferred"][variant]
        if variant.endswith("to stock") or "'overlap_forward': False" in variant:
            assert forwards == 0, label
        else:
            assert forwards >= (case.steps - len(case.poisoned)) // 2, f"{label}: too few deferred updates"
        if "'eager': True" in variant and not (variant.endswith("to stock") or case.caller_accumulates):
            kept, void, streamed = found["speculations"][variant]
            check_speculations(case, found["numbers"]["norm"], kept, void)
            assert streamed > 0 or "streamed" not in variant or case.clip or case.poisoned, label
    numbers = found["numbers"]
    assert (len(numbers["step"]) >= 4) == (case.sub_group_size < 10**9), "a case must have several sub-groups"
    if case.schedule and case.steps > 5:
        assert len(set(numbers["lr"])) > len({group.lr for group in case.groups})
    if case.clip:
        assert any(case.clip < norm < float("inf") for norm in numbers["norm"]), (case.name, numbers["norm"])
    if not case.resume:
        assert numbers["skipped"][-1] >= len(case.poisoned)


def check_speculations(case: Case, norms: list[float], kept: int, void: int) -> None:
    """Check that steps of eager units were speculated, and were in vain exactly if the step was another one."""
    unlikely = [norm for norm in norms if not norm <= (case.clip or math.inf)]
    assert kept + void > 0
    assert kept > 0 or len(unlikely) > MOST_IN_VAIN
    assert void > 0 or not unlikely


@ranks(1, 2)
def test_a_missing_gradient_is_zero_where_stock_reuses_the_last_one() -> None:
    """Check the departure from stock. When stock no longer differs, the departure is obsolete."""
    for case in (case for case in DEPARTURES if case.world_size == dist.get_world_size()):
        zeroed = run_variant(replace(case, zero_instead_of_skip=True), None)
        for block in case.blocks:
            assert_same_bits(zeroed, run_variant(case, block))
        assert differences(zeroed, run_variant(case, None)), case.name


@pytest.mark.P1
@pytest.mark.P6
@ranks(2)
def test_without_a_compiler_the_fallback_to_deepspeeds_op_is_bit_identical_to_stock_and_logs_its_reason() -> None:
    """Let the last rank fall back. The ranks must agree: otherwise they would call different collectives."""
    case = Case(name="fallback", blocks=(CPU, STREAMED, STRIDE_2), steps=4, clip=0.5)
    stock = run_variant(case, None)
    falls_back = dist.get_rank() == dist.get_world_size() - 1
    unavailable = mock.patch.object(library, "_loaded", return_value=KernelUnavailable("No compiler.\nInstall one."))
    with redirect_stdout(StringIO()) as output, unavailable if falls_back else nullcontext():
        for block in case.blocks:
            ours = run_variant(case, block)
            assert ours.optimizer_class == OURS
            assert_same_bits(stock, ours)
            assert ours.deferred == 0, "the fallback cannot update ranges, so no update may be deferred"
    lines = output.getvalue().splitlines()
    starts = [number for number, line in enumerate(lines) if "No compiler." in line]
    assert len(starts) == (len(case.blocks) if falls_back else 0), "once per engine"
    for start in starts:
        assert "Install one." in lines[start + 1]
        assert "fall back to DeepSpeedCPUAdam" in lines[start + 2]
