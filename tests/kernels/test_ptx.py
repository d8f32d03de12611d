"""Compare the GPU kernel's compiled PTX, interpreted instruction by instruction, with the CPU kernel, bit for bit.

The PTX is that of the launches of ``TritonAdam`` on a GPU. The interpretation shows that these instructions give the
CPU kernel's bits. It does not show how ptxas translates them to machine code; ``test_triton.py`` checks that nothing is
contracted there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise, product

import numpy as np
import pytest
import torch

from deep_opt_states.device.kernels.adam import AdamTensors, ElementRange
from deep_opt_states.device.kernels.arithmetic import Arithmetic, Tail
from deep_opt_states.device.kernels.fused import FusedAdam
from tests.kernels.adam_steps import BETAS, GRADS, PARAMS, STEP, differences
from tests.kernels.adversarial_tensors import (
    Offsets,
    adversarial_grad,
    adversarial_tensors,
    changed_guards,
    copied_between_guards,
)
from tests.kernels.compiled import CAPABILITIES, compile_update
from tests.kernels.ptx_launch import PtxKernel, interpreted_adam
from tests.tiers import thorough

pytestmark = pytest.mark.usefixtures("compiled_anew")

OFFSETS = [Offsets(grad=grad, param=param) for grad, param in product((0, 1), (0, 1))]

NUMEL = 4 * 1024 + 77
BORDERS = (0, 1, 795, 3138, 3672, NUMEL - 1, NUMEL)
"""The borders of ranges. They begin and end at each distance from a multiple of 16 bytes, and end in each quarter of a
block, since a thread may store elements of each quarter.

The last range is in the tail. With 16 bits per element, it begins between two multiples of 16 bytes.
"""

WIDTHS = (16, 3074, 4093, 4095, 1)
"""Vector widths. The cut is 13 elements before the end, at the width (inside a block and a thread's vector), or 0."""

STEPS = (
    replace(STEP, step=1, weight_decay=0.0),
    replace(STEP, step=2, lr=1.5, eps=0.0, grad_scale=2.0**-16),
    replace(STEP, step=3, lr=0.5, eps=1e-3, grad_scale=1e3, weight_decay=0.3, bias_correction=False),
)
"""The first step has no weight decay, so that ties among the master weights reach the conversion to 16 bits."""


@dataclass(frozen=True, kw_only=True)
class PtxCase:
    """One kernel that Triton compiles, and the hyperparameters with which it is launched."""

    width: int
    tail: Tail
    grad: torch.dtype
    param: torch.dtype | None
    offsets: Offsets
    adamw: bool
    seed: int

    def differences(self, kernel: PtxKernel, cpu_tail: Tail | None = None) -> Iterator[str]:
        """Yield the differences between ``kernel`` and the CPU kernel after each of three steps.

        The first and the last step update the whole sub-group, and the second one ranges.
        """
        gpu = interpreted_adam(kernel, Arithmetic(self.width, self.tail), adamw=self.adamw)
        tail = self.tail if cpu_tail is None else cpu_tail
        cpu = FusedAdam(Arithmetic(self.width, tail), BETAS, adamw=self.adamw, num_threads=1)
        ours, still = adversarial_tensors(NUMEL, self.grad, self.param, self.offsets, self.seed)
        theirs = copied_between_guards(ours)
        generator = np.random.default_rng(self.seed + 1)
        for step in STEPS:
            grad = adversarial_grad(NUMEL, self.grad, generator, still)
            for adam, tensors in ((gpu, ours), (cpu, theirs)):
                tensors.grad.copy_(grad)
                adam.begin_step([step])
            cpu.update(0, theirs)
            for begin, end in pairwise(BORDERS if step.step == 2 else (0, NUMEL)):
                element_range = ElementRange(begin=begin, end=end, sub_group_numel=NUMEL)
                gpu.update(0, ours.narrow(element_range), element_range)
            for name in (*differences(ours, theirs), *changed_guards(ours), *wrong_nans(ours)):
                yield f"{self}, step {step.step}: {name}"


def wrong_nans(tensors: AdamTensors) -> list[str]:
    """Return the names of tensors with other NaNs than ``AdamKernel`` promises for a GPU."""
    wrong = []
    for name in ("master", "exp_avg", "exp_avg_sq", "param"):
        tensor = getattr(tensors, name)
        if tensor is not None and tensor.dtype != torch.float16:
            bits, nan = (torch.int16, 0x7FC0) if tensor.dtype == torch.bfloat16 else (torch.int32, 0x7FFFFFFF)
            if (tensor.view(bits)[tensor.isnan()] != nan).any():
                wrong.append(f"NaNs of {name}")
    return wrong


def all_cases(tail: Tail, capability: int) -> Iterator[PtxCase]:
    """Yield each combination of dtypes and offsets, with the vector widths and the kinds of decay in turn."""
    combinations = product(GRADS, PARAMS, OFFSETS)
    for index, (grad, param, offsets) in enumerate(combinations):
        if param is None and offsets.param:
            continue
        yield PtxCase(
            width=WIDTHS[index % len(WIDTHS)],
            tail=tail,
            grad=grad,
            param=param,
            offsets=offsets,
            adamw=(index + index // 4) % 2 == 0,
            seed=1000 * capability + index,
        )


def some_cases(tail: Tail, capability: int) -> Iterator[PtxCase]:
    """Yield a part of the combinations: each of them belongs to one tail and one capability."""
    parts = list(product(Tail, CAPABILITIES))
    yield from list(all_cases(tail, capability))[parts.index((tail, capability)) :: len(parts)]


@pytest.mark.promise("P2")
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("tail", Tail)
@pytest.mark.parametrize("cases", ["some", thorough("all")])
def test_interpreted_ptx_has_the_bits_of_the_cpu_kernel(cases: str, tail: Tail, capability: int) -> None:
    chosen = all_cases(tail, capability) if cases == "all" else some_cases(tail, capability)
    kernel = PtxKernel(capability)
    assert [found for case in chosen for found in case.differences(kernel)] == []


def test_some_cases_cover_every_pair_of_dtypes_at_every_offset() -> None:
    everything = {(case.grad, case.param, case.offsets) for case in all_cases(Tail.UNFUSED, 80)}
    found = {
        (case.grad, case.param, case.offsets)
        for tail, capability in product(Tail, CAPABILITIES)
        for case in some_cases(tail, capability)
    }
    assert found == everything
    assert len(everything) == 42


@pytest.mark.parametrize("capability", [CAPABILITIES[0], *map(thorough, CAPABILITIES[1:])])
@pytest.mark.parametrize("tail", [Tail.UNFUSED, *map(thorough, list(Tail)[1:])])
def test_compile_update_compiles_the_kernel_that_is_launched(tail: Tail, capability: int) -> None:
    """Check it because the machine code of ``compile_update`` is examined by ``test_triton.py``."""
    kernel = PtxKernel(capability)
    case = next(case for case in all_cases(tail, capability) if case.grad == case.param == torch.bfloat16)
    assert case.offsets == Offsets()
    next(case.differences(kernel), None)
    assert kernel.launched[0] == compile_update("*bf16", "*bf16", tail, capability).ptx


def test_results_include_ties_subnormals_infinities_and_nans() -> None:
    ours, still = adversarial_tensors(NUMEL, torch.float32, torch.float16, Offsets(), seed=1)
    cpu = FusedAdam(Arithmetic(16, Tail.UNFUSED), BETAS, adamw=True, num_threads=1)
    ours.grad.copy_(adversarial_grad(NUMEL, torch.float32, np.random.default_rng(2), still))
    cpu.begin_step(STEPS[:1])
    cpu.update(0, ours)
    bits = ours.master.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    for even_or_odd in (0, 1):
        assert ((bits & 0x1FFFF) == 0x8000 | even_or_odd << 16).sum() > 5, "ties of bf16"
        normal = (magnitude > 0x38800000) & (magnitude < 0x477FE000)
        assert (normal & ((bits & 0x3FFF) == 0x1000 | even_or_odd << 13)).sum() > 5, "ties of fp16"
    for name in ("master", "exp_avg", "exp_avg_sq"):
        result = getattr(ours, name)
        assert result.isnan().sum() > 5
        assert result.isinf().sum() > 5
        assert ((result != 0) & (result.abs() < 2.0**-126)).sum() > 5, "subnormal"
        assert (result == 0).sum() > 5
        assert result.isfinite().float().mean() > 0.8
    assert ours.param is not None
    assert (ours.param.isinf() & ours.master.isfinite()).sum() > 5, "overflow of fp16"
    assert ((ours.param != 0) & (ours.param.abs() < 2.0**-14)).sum() > 5, "subnormal of fp16"
    zeros = ours.master[ours.master == 0]
    assert 0 < zeros.signbit().sum() < len(zeros), "zeros of both signs"
