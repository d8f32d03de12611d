"""Check the GPU kernel's compiled PTX on split masters: it has the bits of the C++ kernel on whole ones."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
import torch

from deep_opt_states.device.kernels.adam import AdamTensors, ElementRange
from deep_opt_states.device.kernels.arithmetic import Arithmetic, Tail
from deep_opt_states.device.kernels.fused import FusedAdam
from tests.kernels.adam_steps import BETAS, GRADS, differences
from tests.kernels.adversarial_tensors import (
    Offsets,
    adversarial_grad,
    adversarial_numbers,
    adversarial_tensors,
    changed_guards,
    copied_between_guards,
)
from tests.kernels.compiled import (
    CAPABILITIES,
    ELEMENTS_PER_THREAD,
    check_nothing_is_contracted,
    check_rounding,
    compile_update,
)
from tests.kernels.masters import masters_of_every_kind
from tests.kernels.ptx_launch import PtxKernel, interpreted_adam
from tests.kernels.split_copy import SplitCopy, joined
from tests.kernels.test_ptx import BORDERS, NUMEL, OFFSETS, STEPS, WIDTHS
from tests.tiers import thorough

pytestmark = pytest.mark.usefixtures("compiled_anew")

SUMS = {Tail.UNFUSED: 6 * ELEMENTS_PER_THREAD, Tail.GRADIENT_FUSED: 0, Tail.MOMENT_FUSED: 0}
STILL_STEP = replace(STEPS[0], bias_correction=False)


def split_between_guards(whole: AdamTensors) -> AdamTensors:
    """Return the split form of ``whole``, each tensor between guards and at the same alignment."""
    lower_and_upper = SplitCopy.create(whole).tensors
    assert whole.param is not None
    shifted = whole.param.storage_offset() - whole.master.storage_offset()
    return copied_between_guards(
        replace(
            lower_and_upper,
            master=_at_offset(lower_and_upper.master, whole.master.storage_offset()),
            exp_avg=whole.exp_avg,
            exp_avg_sq=_at_offset(lower_and_upper.exp_avg_sq, whole.exp_avg_sq.storage_offset()),
            grad=whole.grad,
            param=_at_offset(lower_and_upper.param, whole.master.storage_offset() + shifted),
        )
    )


def _at_offset(tensor: torch.Tensor | None, offset: int) -> torch.Tensor:
    """Return a copy that begins at element ``offset`` of its memory, which ``copied_between_guards`` keeps."""
    assert tensor is not None
    memory = torch.zeros(offset + tensor.numel(), dtype=tensor.dtype)
    memory[offset:] = tensor
    return memory[offset:]


@dataclass(frozen=True, kw_only=True)
class SplitCase:
    """One kernel that Triton compiles for split masters, and the hyperparameters with which it is launched."""

    width: int
    tail: Tail
    grad: torch.dtype
    offsets: Offsets
    adamw: bool
    seed: int

    def differences(self, kernel: PtxKernel) -> Iterator[str]:
        """Yield the differences between split masters, updated by ``kernel``, and whole ones after three steps each.

        The first and the last step update the whole sub-group, and the second one ranges.
        """
        arithmetic = Arithmetic(self.width, self.tail)
        gpu = interpreted_adam(kernel, arithmetic, adamw=self.adamw)
        cpu = FusedAdam(arithmetic, BETAS, adamw=self.adamw, num_threads=1)
        whole, still = adversarial_tensors(NUMEL, self.grad, torch.bfloat16, self.offsets, self.seed)
        whole.exp_avg_sq.abs_()
        split = split_between_guards(whole)
        generator = np.random.default_rng(self.seed + 1)
        for step in STEPS:
            grad = adversarial_grad(NUMEL, self.grad, generator, still)
            for adam, tensors in ((gpu, split), (cpu, whole)):
                tensors.grad.copy_(grad)
                adam.begin_step([step])
            cpu.update(0, whole)
            for begin, end in pairwise(BORDERS if step.step == 2 else (0, NUMEL)):
                element_range = ElementRange(begin=begin, end=end, sub_group_numel=NUMEL)
                gpu.update(0, split.narrow(element_range), element_range)
            for name in (*differences(joined(split), whole), *changed_guards(split)):
                yield f"{self}, step {step.step}: {name}"
            assert split.param is not None
            assert whole.param is not None
            if not torch.equal(split.param.view(torch.int16), whole.param.view(torch.int16)):
                yield f"{self}, step {step.step}: upper halves"


def all_cases(tail: Tail, capability: int) -> Iterator[SplitCase]:
    """Yield each combination of gradients and offsets, with the vector widths and the kinds of decay in turn."""
    for index, (grad, offsets) in enumerate(product(GRADS, OFFSETS)):
        yield SplitCase(
            width=WIDTHS[index % len(WIDTHS)],
            tail=tail,
            grad=grad,
            offsets=offsets,
            adamw=index % 2 == 0,
            seed=1000 * capability + index,
        )


def some_cases(tail: Tail, capability: int) -> list[SplitCase]:
    """Return a part of the combinations: each of them belongs to one tail and one capability."""
    parts = list(product(Tail, CAPABILITIES))
    return list(all_cases(tail, capability))[parts.index((tail, capability)) :: len(parts)]


@pytest.mark.promise("P2")
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("tail", Tail)
@pytest.mark.parametrize("cases", ["some", thorough("all")])
def test_interpreted_ptx_updates_split_masters_with_the_bits_of_whole_ones(
    cases: str, tail: Tail, capability: int
) -> None:
    chosen = list(all_cases(tail, capability)) if cases == "all" else some_cases(tail, capability)
    kernel = PtxKernel(capability)
    assert [found for case in chosen for found in case.differences(kernel)] == []


def test_some_split_cases_cover_every_gradient_at_every_offset() -> None:
    chosen = [
        (case.grad, case.offsets)
        for tail, capability in product(Tail, CAPABILITIES)
        for case in some_cases(tail, capability)
    ]
    assert len(set(chosen)) == len(chosen) == len(GRADS) * len(OFFSETS)


@pytest.mark.promise("P2")
def test_interpreted_ptx_keeps_masters_of_every_kind_that_do_not_move() -> None:
    """Check ties in every element, subnormals, numbers close to overflow, and zeros of both signs."""
    chance = np.random.default_rng(3)
    gpu = interpreted_adam(PtxKernel(90), Arithmetic(16, Tail.UNFUSED), adamw=True)
    gpu.begin_step([STILL_STEP])
    for master in masters_of_every_kind(NUMEL, chance):
        zeros = torch.zeros(NUMEL)
        whole = AdamTensors(
            master=master,
            exp_avg=zeros,
            exp_avg_sq=adversarial_numbers(NUMEL, chance).abs().nan_to_num(1.0, 1.0) * 0 + 1,
            grad=zeros.bfloat16(),
            param=master.bfloat16(),
        )
        split = SplitCopy.create(whole).tensors
        split = replace(split, master=split.master.clone(), param=_at_offset(split.param, 0))
        expected = joined(split)
        gpu.update(0, split)
        found = joined(split)
        number = ~master.isnan()
        assert torch.equal(found.master.view(torch.int32)[number], master.view(torch.int32)[number])
        assert torch.equal(expected.master.view(torch.int32)[number], master.view(torch.int32)[number])


@pytest.mark.promise("P2")
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("tail", Tail)
def test_every_operation_on_split_masters_rounds_as_ieee_754_requires(
    tail: Tail, capability: int, tmp_path: Path
) -> None:
    compiled = compile_update("*bf16", "*bf16", tail, capability, master="*i16")
    check_rounding(compiled)
    check_nothing_is_contracted(compiled, SUMS[tail], tmp_path)


@pytest.mark.parametrize(
    ("instruction", "replaced"),
    [
        (r"setp\.eq\.b32(.*), 32768;", r"setp.eq.b32\1, 32767;"),
        (r"and\.b32(.*), 131071;", r"and.b32\1, 65535;"),
        (r"shr\.u32(.*), 31;", r"shr.u32\1, 30;"),
        (r"and\.b32(.*), 2147483647;", r"and.b32\1, -1;"),
        (r"neg\.f32", "abs.f32"),
    ],
    ids=["another flag", "one bit less", "another bit of the moment", "a flag that is kept", "no flag"],
)
def test_wrong_instructions_on_the_halves_are_noticed(instruction: str, replaced: str) -> None:
    """Check that the comparison can fail: with each edit of the PTX it does."""
    case = SplitCase(width=16, tail=Tail.GRADIENT_FUSED, grad=torch.bfloat16, offsets=Offsets(), adamw=True, seed=7)
    right = PtxKernel(90)
    assert list(case.differences(right)) == []
    ptx = right.launched[0]
    edited, count = re.subn(instruction, replaced, ptx)
    assert count > 0, ptx
    assert next(case.differences(PtxKernel(90, {ptx: edited})), None)
