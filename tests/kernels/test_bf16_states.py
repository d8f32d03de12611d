"""Compare the C++ kernel with stock's op, bit for bit, if master weights are bf16, with fp32 or bf16 moments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch

from deep_opt_states.device.kernels.adam import (
    BF16_MASTERS,
    BF16_STATES,
    DEFAULT_BETAS,
    STATES,
    AdamStep,
    AdamTensors,
    ElementRange,
    RangeUpdate,
    StateDtypes,
    UpdatedStates,
)
from deep_opt_states.device.kernels.arithmetic import CANDIDATES, Arithmetic, Tail
from deep_opt_states.device.kernels.fused import FusedAdam
from deep_opt_states.device.kernels.library import InstructionSet, library
from deep_opt_states.device.kernels.probe_arithmetic import _train, find_arithmetic
from tests.kernels.adam_steps import (
    BETAS,
    STEP,
    Stock,
    copied,
    differences,
    fused,
    in_dtypes,
    machine_arithmetic,
    random_tensors,
    steps_of,
)

SETS = [one for one in InstructionSet if one <= library().instruction_set]

NUMELS = (1, 7, 15, 16, 17, 31, 33, 1003)
BOTH = pytest.mark.parametrize("dtypes", [BF16_MASTERS, BF16_STATES], ids=["fp32 moments", "bf16 moments"])


def thorough_steps(numel: int) -> Any:
    """Return the parameters of a test of a thousand steps, which ``make test`` omits."""
    return pytest.param(numel, 1000, marks=pytest.mark.thorough)


def all_bf16(generator: torch.Generator) -> torch.Tensor:
    """Return all 65,536 bf16 values in a random order."""
    return (
        torch.arange(-(2**15), 2**15, dtype=torch.int32)
        .short()[torch.randperm(2**16, generator=generator)]
        .view(torch.bfloat16)
    )


def with_every_value(dtypes: StateDtypes, seed: int) -> AdamTensors:
    """Return a sub-group whose gradients and bf16 states each have every value, in random combinations."""
    generator = torch.Generator().manual_seed(seed)
    wild, _ = random_tensors(2**16, torch.bfloat16, torch.bfloat16, seed)
    is_fp32 = dtypes.moment == torch.float32
    exp_avg = wild.exp_avg if is_fp32 else all_bf16(generator)
    exp_avg_sq = wild.exp_avg_sq if is_fp32 else all_bf16(generator)
    return replace(wild, master=all_bf16(generator), exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, grad=all_bf16(generator))


@pytest.mark.promise("P1")
@BOTH
@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("adamw", [True, False])
def test_all_bf16_values_in_random_combinations_give_the_bits_of_stock(
    adamw: bool, instruction_set: InstructionSet, dtypes: StateDtypes
) -> None:
    kernel = fused(adamw=adamw, num_threads=2, instruction_set=instruction_set, dtypes=dtypes)
    for seed, step in enumerate(clipped_in_turn(6)):
        ours = with_every_value(dtypes, seed)
        theirs = copied(ours)
        kernel.restart()
        kernel.begin_step([step])
        kernel.update(0, ours)
        Stock(theirs, adamw=adamw).update(step, ours.grad)
        assert differences(ours, theirs) == [], step


def clipped_in_turn(count: int, **changes: Any) -> Iterator[AdamStep]:
    """Yield steps of which every other one does not scale the gradient: the kernel then leaves out a rounding."""
    for number, step in enumerate(steps_of(count, **changes)):
        yield step if number % 2 else replace(step, grad_scale=1.0)


@pytest.mark.promise("P1")
@BOTH
@pytest.mark.parametrize(("numel", "steps"), [(1, 50), (17, 50), *(thorough_steps(numel) for numel in NUMELS)])
@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32])
def test_many_steps_of_any_length_give_the_bits_of_stock(
    grad_dtype: torch.dtype, numel: int, steps: int, dtypes: StateDtypes
) -> None:
    """Check fp32 gradients, as sums over micro-batches are, and one step in ranges that cut vectors and the tail."""
    start, gradient = random_tensors(numel, grad_dtype, torch.bfloat16, seed=numel)
    ours = in_dtypes(start, dtypes)
    theirs = copied(ours)
    stock, kernel = Stock(theirs, adamw=True), fused(dtypes=dtypes)
    borders = sorted({0, numel // 3, numel // 2 + 1, numel})
    for step in clipped_in_turn(steps, lr=1e-2):
        ours.grad.copy_(gradient())
        kernel.begin_step([step])
        for begin, end in pairwise(borders):
            elements = ElementRange(begin=begin, end=end, sub_group_numel=numel)
            kernel.update(0, ours.narrow(elements), elements)
        stock.update(step, ours.grad)
        assert differences(ours, theirs) == [], step


@BOTH
@pytest.mark.parametrize("offset", [0, 1, 16])
@pytest.mark.parametrize("has_param", [True, False])
def test_other_memory_receives_the_bits_of_an_update_in_place(
    has_param: bool, offset: int, dtypes: StateDtypes
) -> None:
    numel = 70_003
    start, gradient = random_tensors(numel, torch.bfloat16, torch.bfloat16, seed=offset)
    ours = in_dtypes(start if has_param else replace(start, param=None), dtypes)
    ours.grad.copy_(gradient())
    before, in_place = copied(ours), copied(ours)
    kernel = fused(num_threads=2, dtypes=dtypes)
    new = UpdatedStates(*(torch.zeros(numel + 32, dtype=getattr(ours, name).dtype)[offset:][:numel] for name in STATES))
    update = RangeUpdate(sub_group=0, tensors=ours, element_range=ElementRange.whole(numel))
    kernel.begin_step([STEP])
    kernel.update_ranges([replace(update, updated=new), replace(update, tensors=in_place)])
    assert differences(replace(before, param=None), replace(ours, param=None)) == []
    assert differences(replace(ours, **new._asdict()), in_place) == []


@BOTH
def test_the_search_distinguishes_all_arithmetics_that_compute_differently(dtypes: StateDtypes) -> None:
    """Check the candidates against one another: rounding to bf16 hides nearly all of their differences."""

    def bits(arithmetic: Arithmetic) -> torch.Tensor:
        return _train(FusedAdam(arithmetic, DEFAULT_BETAS, adamw=True, num_threads=1), dtypes)

    trained = {candidate: bits(candidate) for candidate in CANDIDATES if not candidate.pow_when_repeated}
    for (one, bits_of_one), (other, bits_of_other) in combinations(trained.items(), 2):
        is_same = one.tail == other.tail == Tail.GRADIENT_FUSED
        assert torch.equal(bits_of_one, bits_of_other) == is_same, (one, other)
    assert find_arithmetic(dtypes) == machine_arithmetic(dtypes)


@BOTH
def test_tensors_in_other_dtypes_are_refused(dtypes: StateDtypes) -> None:
    start, _ = random_tensors(64, torch.bfloat16, torch.bfloat16, seed=0)
    tensors = in_dtypes(start, dtypes)
    kernel = FusedAdam(machine_arithmetic(dtypes), BETAS, adamw=True, num_threads=1)
    kernel.begin_step([STEP])
    for wrong in (
        replace(tensors, exp_avg=tensors.exp_avg.half()),
        replace(tensors, exp_avg_sq=tensors.exp_avg_sq.half()),
        replace(tensors, grad=tensors.grad.half()),
        replace(tensors, param=torch.zeros(64)),
        replace(start, exp_avg=start.exp_avg.bfloat16(), exp_avg_sq=start.exp_avg_sq.bfloat16()),
    ):
        with pytest.raises(AssertionError):
            kernel.update(0, wrong)
