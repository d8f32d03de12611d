"""Test that the executor on CUDA streams gives the serial bits.

The updates consist of little but copies, so that a missing wait gives wrong numbers.
"""

from __future__ import annotations

import random

import pytest
import torch

from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan, place_all
from perf_model.schedule.workload import Workload
from tests.gpu.updates import deferred, executed, random_plan, serial, serial_of_deferred
from tests.runtime.random_states import same

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize("seed", range(36))
def test_every_plan_gives_the_serial_bits(seed: int) -> None:
    plan = random_plan(seed)
    dtype = DTYPES[seed % 3]
    grad_dtype = torch.float32 if seed % 2 else dtype
    assert same(executed(plan, dtype, grad_dtype, seed), serial(plan, dtype, grad_dtype, seed)), str(plan.schedule)


@pytest.mark.parametrize("seed", range(24))
def test_every_plan_gives_the_serial_bits_while_forward_gathers(seed: int) -> None:
    plan = random_plan(seed)
    dtype = DTYPES[seed % 3]
    grad_dtype = torch.float32 if seed % 2 else dtype
    expected = serial_of_deferred(plan, dtype, grad_dtype, seed)
    assert same(deferred(plan, dtype, grad_dtype, seed), expected), str(plan.schedule)


@pytest.mark.parametrize("seed", range(100, 112))
def test_gradients_of_two_dtypes_give_the_serial_bits(seed: int) -> None:
    """Check this also for persistent parameters, which are in one unit."""
    plan = random_plan(seed)
    chosen = random.Random(seed)
    grad_dtypes = [chosen.choice((torch.bfloat16, torch.float32)) for _ in plan.placements]
    expected = serial_of_deferred(plan, torch.bfloat16, grad_dtypes, seed)
    assert same(deferred(plan, torch.bfloat16, grad_dtypes, seed), expected), f"{plan.schedule}, {grad_dtypes}"


def test_an_fp32_gradient_among_bf16_gradients_gives_the_serial_bits() -> None:
    workload = Workload.from_numels([64, 4096, 700_001, 33])
    plan = UpdatePlan(workload=workload, placements=place_all(workload, Placement.STREAMED), num_slots=2)
    for at in range(4):
        grad_dtypes = [torch.float32 if at == index else torch.bfloat16 for index in range(4)]
        expected = serial_of_deferred(plan, torch.bfloat16, grad_dtypes, seed=at)
        assert same(deferred(plan, torch.bfloat16, grad_dtypes, seed=at), expected), grad_dtypes


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_equal_units_streamed_repeatedly_through_few_slots_give_the_serial_bits(num_slots: int) -> None:
    """Check that no action starts too early: it would read the previous unit's numbers, of equal shape."""
    workload = Workload.from_numels([700_001] * 8)
    plan = UpdatePlan(workload=workload, placements=place_all(workload, Placement.STREAMED), num_slots=num_slots)
    expected = serial(plan, torch.bfloat16, torch.bfloat16, seed=1, count=10)
    for _ in range(3):
        assert same(executed(plan, torch.bfloat16, torch.bfloat16, seed=1, count=10), expected)


def test_the_comparison_detects_wrong_numbers() -> None:
    plan = random_plan(3)
    expected = serial(plan, torch.bfloat16, torch.bfloat16, seed=3)
    assert not same(serial(plan, torch.bfloat16, torch.bfloat16, seed=4), expected)
    assert not same(serial(plan, torch.bfloat16, torch.float32, seed=3), expected)
