"""Check that split master weights lose nothing, and that the C++ kernel updates them with the bits of whole ones."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle, islice

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deep_opt_states.device.kernels.adam import DEFAULT_BETAS, AdamStep, AdamTensors, ElementRange
from deep_opt_states.device.kernels.library import InstructionSet, KernelUnavailable, library
from deep_opt_states.device.kernels.split_form import halves, join, split
from deep_opt_states.device.kernels.stock import StockAdam
from tests.kernels.adam_steps import GRADS, STEP, copied, differences, fused, random_tensors, steps_of
from tests.kernels.adversarial_tensors import adversarial_grad, adversarial_numbers
from tests.kernels.masters import masters_of_every_kind
from tests.kernels.split_copy import SplitCopy

SETS = [one for one in InstructionSet if one <= library().instruction_set]


@pytest.mark.promise("P1")
@given(st.integers(1, 3000), st.integers(0, 2**32))
def test_masters_that_are_split_and_joined_have_the_same_bits(numel: int, seed: int) -> None:
    chance = np.random.default_rng(seed)
    for master in masters_of_every_kind(numel, chance):
        memory, exp_avg_sq = master.clone(), adversarial_numbers(numel, chance).abs()
        moments = exp_avg_sq.clone()
        split(memory, exp_avg_sq)
        number = ~master.isnan()
        _, upper = halves(memory)
        assert torch.equal(upper.view(torch.int16)[number], master.bfloat16().view(torch.int16)[number])
        assert torch.equal(upper.isnan(), ~number)
        join(memory, exp_avg_sq)
        assert torch.equal(memory.view(torch.int32)[number], master.view(torch.int32)[number])
        assert torch.equal(memory.isnan(), ~number)
        assert torch.equal(exp_avg_sq.view(torch.int32), moments.view(torch.int32))


def test_the_lower_16_bits_alone_do_not_distinguish_ties() -> None:
    """Check that the flag is needed: without it, ties that were rounded down are joined to other numbers."""
    master = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8])
    memory, exp_avg_sq = master.clone(), torch.ones(2)
    split(memory, exp_avg_sq)
    assert exp_avg_sq.tolist() == [-1, 1]
    join(memory, exp_avg_sq.abs())
    assert memory.tolist() == [1 - 2**-9, 1 + 3 * 2**-8]


def test_negative_second_moments_are_refused_and_nothing_is_changed() -> None:
    memory, exp_avg_sq = torch.tensor([1.5, 2.5, 3.5]), torch.tensor([1.0, -2.0, torch.nan])
    with pytest.raises(ValueError, match="at least 0; found -2"):
        split(memory, exp_avg_sq)
    assert memory.tolist() == [1.5, 2.5, 3.5]
    assert exp_avg_sq[:2].tolist() == [1, -2]
    assert exp_avg_sq[2].isnan()


@pytest.mark.promise("P1")
@pytest.mark.parametrize("instruction_set", SETS)
def test_1000_updates_in_a_row_of_split_masters_have_the_bits_of_whole_ones(instruction_set: InstructionSet) -> None:
    """Train masters of every kind for 1,000 steps with the decay of AdamW, in ranges of odd lengths.

    A third of the gradients are zero, so that only the decay moves these masters, a third are plain, and a third
    adversarial, so that these states overflow at some time.
    """
    numel, chance = 1003, np.random.default_rng(1)
    kernel = fused(instruction_set=instruction_set)
    ranges = [
        ElementRange(begin=0, end=517, sub_group_numel=numel),
        ElementRange(begin=517, end=1003, sub_group_numel=numel),
    ]
    kind = torch.from_numpy(chance.integers(0, 3, numel))
    plain = [torch.from_numpy(chance.standard_normal(numel, dtype=np.float32)).bfloat16() for _ in range(53)]
    grads = [adversarial_grad(numel, torch.bfloat16, chance, kind == 0).where(kind != 1, one) for one in plain]
    has_been_tie = torch.zeros(numel, dtype=torch.bool)
    for master in masters_of_every_kind(numel, chance):
        whole = AdamTensors(
            master=master,
            exp_avg=torch.zeros(numel),
            exp_avg_sq=torch.zeros(numel),
            grad=torch.zeros(numel, dtype=torch.bfloat16),
            param=torch.zeros(numel, dtype=torch.bfloat16),
        )
        found = SplitCopy.create(whole)
        for step, grad in enumerate(islice(cycle(grads), 1000), 1):
            whole.grad.copy_(grad)
            found.tensors.grad.copy_(grad)
            kernel.begin_step([replace(STEP, step=step)])
            kernel.update(0, whole)
            for element_range in ranges:
                kernel.update(0, found.tensors.narrow(element_range), element_range)
            has_been_tie |= found.tensors.exp_avg_sq.signbit()
            if step % 10 == 0:
                assert differences(found.joined(), whole) == [], step
    assert has_been_tie[kind == 1].sum() > 5, "some masters that have moved need the flag"


@pytest.mark.promise("P1")
@given(
    numel=st.integers(1, 700),
    grad_dtype=st.sampled_from(GRADS),
    adamw=st.booleans(),
    weight_decay=st.sampled_from([0.0, 0.1]),
    num_threads=st.integers(1, 2),
    instruction_set=st.sampled_from(SETS),
    seed=st.integers(0, 2**32),
)
def test_odd_lengths_and_every_option_update_split_masters_like_whole_ones(
    numel: int,
    grad_dtype: torch.dtype,
    adamw: bool,
    weight_decay: float,
    num_threads: int,
    instruction_set: InstructionSet,
    seed: int,
) -> None:
    kernel = fused(adamw=adamw, num_threads=num_threads, instruction_set=instruction_set)
    whole, gradient = random_tensors(numel, grad_dtype, torch.bfloat16, seed)
    found = SplitCopy.create(whole)
    for step in steps_of(3, weight_decay=weight_decay):
        whole.grad.copy_(gradient())
        found.tensors.grad.copy_(whole.grad)
        kernel.begin_step([step])
        kernel.update(0, whole)
        kernel.update(0, found.tensors)
        assert differences(found.joined(), whole) == []


def check_every_master(first: int, numel: int, step: AdamStep) -> None:
    """Split, update and join the masters with the bits from ``first`` on, with every instruction set.

    Gradients and moments are zero, so that an update changes nothing: it joins each master and splits it again.
    """
    master = torch.arange(first, first + numel, dtype=torch.int64).to(torch.int32).view(torch.float32)
    zeros = torch.zeros(numel)
    start = AdamTensors(
        master=master,
        exp_avg=zeros,
        exp_avg_sq=zeros,
        grad=zeros.bfloat16(),
        param=master.bfloat16(),
    )
    before = SplitCopy.create(start)
    assert differences(before.joined(), start) == []
    has_nan = bool(master.isnan().any())
    for instruction_set in SETS:
        kernel = fused(num_threads=2, instruction_set=instruction_set)
        kernel.begin_step([step])
        whole = copied(start)
        kernel.update(0, whole)
        assert differences(whole, start) == [], (first, instruction_set)
        # A NaN keeps its place, and not its bits, so that only joined masters can be compared.
        found = SplitCopy.create(start) if has_nan else SplitCopy(before.memory, copied(before.tensors))
        kernel.update(0, found.tensors)
        differ = differences(found.joined(), start) if has_nan else differences(found.tensors, before.tensors)
        assert differ == [], (first, instruction_set)


def test_masters_at_the_borders_of_exponents_are_split_and_updated_without_loss() -> None:
    """Check the masters around zero, the smallest normal number, 1 and infinity, and their negatives."""
    for sign in (0, 2**31):
        for center in (2**19, 0x00800000, 0x3F800000, 0x7F800000):
            check_every_master(sign + center - 2**19, 2**20, replace(STEP, weight_decay=0.0))


@pytest.mark.thorough
def test_all_2_to_the_32_masters_are_split_and_updated_without_loss() -> None:
    for first in range(0, 2**32, 2**24):
        check_every_master(first, 2**24, replace(STEP, weight_decay=0.0))


def test_the_fallback_kernel_refuses_split_masters() -> None:
    whole, _ = random_tensors(64, torch.bfloat16, torch.bfloat16, seed=0)
    kernel = StockAdam(1, DEFAULT_BETAS, adamw=True)
    kernel.begin_step([STEP])
    with pytest.raises(KernelUnavailable, match="cannot update split masters"):
        kernel.update(0, SplitCopy.create(whole).tensors)


def test_tensors_that_do_not_fit_split_masters_are_refused() -> None:
    whole, _ = random_tensors(64, torch.bfloat16, torch.bfloat16, seed=0)
    tensors = SplitCopy.create(whole).tensors
    kernel = fused()
    kernel.begin_step([STEP])
    for wrong in (
        replace(tensors, param=None),
        replace(tensors, param=torch.zeros(64)),
        replace(tensors, exp_avg=tensors.master),
    ):
        with pytest.raises(AssertionError):
            kernel.update(0, wrong)
