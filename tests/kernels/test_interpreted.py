"""Compare the GPU kernel in Triton's interpreter with the CPU kernel, bit for bit.

The interpreter uses numpy, whose operations on float32 are correctly rounded. The exception is the fused multiply-add,
which some versions of Triton round twice there; this module replaces it by one that rounds once. So this checks the
source of the kernel, and not the code that a GPU executes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import cycle, pairwise, permutations, product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from deep_opt_states.device.kernels import triton_kernel
from deep_opt_states.device.kernels.adam import (
    BF16_MASTERS,
    BF16_STATES,
    FP32_STATES,
    AdamTensors,
    ElementRange,
    StateDtypes,
)
from deep_opt_states.device.kernels.arithmetic import Arithmetic, Tail
from deep_opt_states.device.kernels.fused import FusedAdam
from deep_opt_states.device.kernels.triton_adam import BlockShape, TritonAdam
from tests.kernels.adam_steps import (
    BETAS,
    GRADS,
    PARAMS,
    STEP,
    copied,
    differences,
    difficult_tensors,
    fused_multiply_add,
)
from tests.ranks import ranks

NUMEL = 4 * 1024 + 77
BORDERS = (0, 1, 795, 3138, 3672, NUMEL - 1, NUMEL)
"""The borders of ranges. They begin and end at each distance from a multiple of 16 bytes."""

LENGTHS = (63, 64, 65)
"""Lengths of less than one block of 64 elements, of one block, and of more."""

WIDTHS = (16, 3074, 4093, 4095, 1)
"""Vector widths. The cut is 13 elements before the end, at the width (inside a block and a thread's vector), or 0."""

STEPS = (
    replace(STEP, step=1, weight_decay=0.0),
    replace(STEP, step=2, lr=1.5, eps=0.0, grad_scale=2.0**-16),
    replace(STEP, step=3, lr=0.5, eps=1e-3, grad_scale=1e3, weight_decay=0.3, bias_correction=False),
)
"""The first step has no weight decay, so that ties among the master weights reach the conversion to 16 bits."""


def compared(
    gpu_arithmetic: Arithmetic,
    grad_dtype: torch.dtype,
    param_dtype: torch.dtype | None,
    adamw: bool,
    dtypes: StateDtypes = FP32_STATES,
    *,
    seed: int = 0,
    numel: int = NUMEL,
    cpu_arithmetic: Arithmetic | None = None,
) -> list[str]:
    """Return the differences between the two kernels for difficult values, also outside of the ranges of an update.

    The first and the last step update the whole sub-group, and the second one every other range.
    """
    block = BlockShape(elements=64 if numel < 1000 else 4096)
    gpu = TritonAdam(gpu_arithmetic, BETAS, adamw=adamw, device=torch.device("cpu"), block=block)
    cpu = FusedAdam(cpu_arithmetic or gpu_arithmetic, BETAS, adamw=adamw, num_threads=1)
    ours, gradient = difficult_tensors(numel, grad_dtype, param_dtype, dtypes, seed)
    theirs = copied(ours)
    found = []
    for step in STEPS:
        grad = gradient()
        for kernel, tensors in ((gpu, ours), (cpu, theirs)):
            tensors.grad.copy_(grad)
            kernel.begin_step([step])
        borders: Sequence[int] = sorted({0, 1, numel // 3, numel // 2 + 1, numel}) if numel < NUMEL else BORDERS
        for begin, end in [*pairwise(borders)][::2] if step.step == 2 else [(0, numel)]:
            element_range = ElementRange(begin=begin, end=end, sub_group_numel=numel)
            for kernel, tensors in ((gpu, ours), (cpu, theirs)):
                kernel.update(0, tensors.narrow(element_range), element_range)
        if wrong := [*differences(ours, theirs), *wrong_nans(ours)]:
            case = f"{gpu_arithmetic}, {dtypes}, {grad_dtype}, {param_dtype}, seed {seed}, adamw {adamw}, {numel}"
            found.append(f"{case}, step {step.step}: {', '.join(wrong)}")
    return found


def wrong_nans(tensors: AdamTensors) -> list[str]:
    """Return the names of bf16 tensors with other NaNs than ``AdamKernel`` promises."""
    return [
        f"NaNs of {name}"
        for name, tensor in vars(tensors).items()
        if name != "grad" and tensor is not None and tensor.dtype == torch.bfloat16
        if (tensor.view(torch.int16)[tensor.isnan()] != 0x7FC0).any()
    ]


def cases() -> Iterator[tuple[Tail, torch.dtype, torch.dtype | None, bool, StateDtypes]]:
    """Yield every pair of dtypes of gradient and parameters, with tails and kinds of decay in turn."""
    bf16_states = product((BF16_MASTERS, BF16_STATES), GRADS[:2], (torch.bfloat16, None))
    pairs = [*((FP32_STATES, *pair) for pair in product(GRADS, PARAMS)), *bf16_states]
    for (states, grad, param), tail, adamw in zip(pairs, cycle(Tail), cycle((True, False)), strict=False):
        yield tail, grad, param, adamw, states


@pytest.mark.P2
@ranks(1, fresh=True, group=nullcontext, TRITON_INTERPRET="1")
def test_interpreted_kernel_has_the_bits_of_the_cpu_kernel() -> None:
    def create_fma(self: InterpreterBuilder, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
        return TensorHandle(fused_multiply_add(x.data, y.data, z.data), z.dtype.scalar)

    InterpreterBuilder.create_fma = create_fma
    # The interpreter cannot call CUDA's library; numpy rounds a sum as add_rn does.
    triton_kernel.libdevice = SimpleNamespace(add_rn=lambda a, b: a + b)
    with np.errstate(all="ignore"):
        for seed, (tail, *options) in enumerate(cases()):
            arithmetic = Arithmetic(WIDTHS[seed % len(WIDTHS)], tail)
            assert compared(arithmetic, *options, seed=seed) == []
            length = LENGTHS[seed % len(LENGTHS)]
            assert compared(Arithmetic((16, 1)[seed % 2], tail), *options, seed=seed, numel=length) == []
        for one, other in permutations((Arithmetic(1, tail) for tail in Tail), 2):
            assert compared(one, torch.float32, None, True, cpu_arithmetic=other), "another arithmetic has other bits"
