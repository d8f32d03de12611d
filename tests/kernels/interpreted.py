"""Compare the GPU kernel in Triton's interpreter with the CPU kernel, bit for bit. ``test_triton.py`` runs this
program.

The interpreter uses numpy, whose operations on float32 are correctly rounded. The exception is the fused multiply-add,
which some versions of Triton round twice there; this module replaces it by one that rounds once. So this checks the
source of the kernel, and not the code that a GPU executes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, pairwise, permutations, product
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
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
    in_dtypes,
    random_tensors,
    with_infinities,
)
from tests.kernels.adversarial_tensors import (
    Offsets,
    adversarial_grad,
    adversarial_tensors,
    changed_guards,
    copied_between_guards,
)
from tests.kernels.fp32_operations import fused_multiply_add
from tests.launch import answer

LENGTHS = (63, 64, 65, 4111)
"""Lengths of less than one block, one block, and more. Blocks have 64 elements, or 4096 to cover many kinds of
numbers."""

NUMEL = 4 * 1024 + 77
BORDERS = (0, 1, 795, 3138, 3672, NUMEL - 1, NUMEL)
"""The borders of ranges between guards. They begin and end at each distance from a multiple of 16 bytes."""

WIDTHS = (16, 3074, 4093, 4095, 1)
"""Vector widths. The cut is 13 elements before the end, at the width (inside a block and a thread's vector), or 0."""

STEPS = (
    replace(STEP, step=1, weight_decay=0.0),
    replace(STEP, step=2, lr=1.5, eps=0.0, grad_scale=2.0**-16),
    replace(STEP, step=3, lr=0.5, eps=1e-3, grad_scale=1e3, weight_decay=0.3, bias_correction=False),
)
"""The first step has no weight decay, so that ties among the master weights reach the conversion to 16 bits."""


def create_fma(self: InterpreterBuilder, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
    return TensorHandle(fused_multiply_add(x.data, y.data, z.data), z.dtype.scalar)


def compared(
    gpu_arithmetic: Arithmetic,
    cpu_arithmetic: Arithmetic,
    grad_dtype: torch.dtype,
    param_dtype: torch.dtype | None,
    adamw: bool,
    dtypes: StateDtypes = FP32_STATES,
) -> list[str]:
    """Return the differences between the two kernels, over all lengths and two steps each."""
    found = []
    for numel in LENGTHS:
        plain, gradient = random_tensors(numel, grad_dtype, param_dtype, seed=numel)
        ours = in_dtypes(plain, dtypes)
        theirs = copied(ours)
        block = BlockShape(elements=64 if numel < 1000 else 4096)
        gpu = TritonAdam(gpu_arithmetic, BETAS, adamw=adamw, device=torch.device("cpu"), block=block)
        cpu = FusedAdam(cpu_arithmetic, BETAS, adamw=adamw, num_threads=1)
        for number in (1, 2):
            grad = with_infinities(gradient(), seed=number) if numel == 65 else gradient()
            step = replace(STEP, step=number, weight_decay=0.0 if numel == 63 else 0.1)
            for kernel, tensors in ((gpu, ours), (cpu, theirs)):
                tensors.grad.copy_(grad)
                kernel.begin_step([step])
            cpu.update(0, theirs)
            # The second step is done in ranges that cut blocks, vectors and the tail.
            borders = [0, numel] if number == 1 else sorted({0, 1, numel // 3, numel // 2 + 1, numel - 1, numel})
            for begin, end in pairwise(borders):
                element_range = ElementRange(begin=begin, end=end, sub_group_numel=numel)
                gpu.update(0, ours.narrow(element_range), element_range)
            if differ := differences(ours, theirs):
                case = f"{cpu_arithmetic}, {dtypes}, {grad_dtype}, {param_dtype}, adamw {adamw}"
                found.append(f"{case}, {numel} elements, step {number}: {', '.join(differ)}")
    return found


def compared_between_guards(
    arithmetic: Arithmetic,
    grad_dtype: torch.dtype,
    param_dtype: torch.dtype | None,
    adamw: bool,
    dtypes: StateDtypes = FP32_STATES,
    *,
    seed: int,
) -> list[str]:
    """Return the differences between the two kernels for difficult values, and whether they write outside of a range.

    The first and the last step update the whole sub-group, and the second one ranges. The gradient and the parameters
    begin at a multiple of 16 bytes or behind it, in turn.
    """
    offsets = Offsets(grad=seed % 2, param=seed // 2 % 2)
    gpu = TritonAdam(arithmetic, BETAS, adamw=adamw, device=torch.device("cpu"))
    cpu = FusedAdam(arithmetic, BETAS, adamw=adamw, num_threads=1)
    ours, still = adversarial_tensors(NUMEL, grad_dtype, param_dtype, offsets, seed, dtypes)
    theirs = copied_between_guards(ours)
    generator = np.random.default_rng(seed + 1)
    found = []
    for step in STEPS:
        grad = adversarial_grad(NUMEL, grad_dtype, generator, still)
        for kernel, tensors in ((gpu, ours), (cpu, theirs)):
            tensors.grad.copy_(grad)
            kernel.begin_step([step])
        cpu.update(0, theirs)
        for begin, end in pairwise(BORDERS if step.step == 2 else (0, NUMEL)):
            element_range = ElementRange(begin=begin, end=end, sub_group_numel=NUMEL)
            gpu.update(0, ours.narrow(element_range), element_range)
        if wrong := [*differences(ours, theirs), *changed_guards(ours), *wrong_nans(ours)]:
            case = f"{arithmetic}, {dtypes}, {grad_dtype}, {param_dtype}, {offsets}, adamw {adamw}"
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


def cases() -> Iterator[tuple[Arithmetic, torch.dtype, torch.dtype | None, bool]]:
    """Yield every tail with every pair of dtypes.

    Dtypes matter only where the kernel loads and stores, so the vector widths and the kinds of decay alternate over
    them: each tail is combined with every width and every kind of decay three times, with different dtypes.
    """
    widths_and_decays = list(product((16, 1), (True, False)))
    for tail, (row, grad), (column, param) in product(Tail, enumerate(GRADS), enumerate(PARAMS)):
        width, adamw = widths_and_decays[(row + column) % len(widths_and_decays)]
        yield Arithmetic(width, tail), grad, param, adamw


def main() -> None:
    InterpreterBuilder.create_fma = create_fma
    # The interpreter cannot call CUDA's library; numpy rounds a sum as add_rn does.
    triton_kernel.libdevice = SimpleNamespace(add_rn=lambda a, b: a + b)
    differ: list[str] = []
    seeds = count()
    for arithmetic, *options in cases():
        differ += compared(arithmetic, arithmetic, *options)
        seed = next(seeds)
        arithmetic = Arithmetic(WIDTHS[seed % len(WIDTHS)], arithmetic.tail)
        differ += compared_between_guards(arithmetic, *options, seed=seed)
    for tail, dtypes, grad in product(Tail, (BF16_MASTERS, BF16_STATES), GRADS[:2]):
        for param, adamw in ((torch.bfloat16, True), (None, False)):
            differ += compared(Arithmetic(16, tail), Arithmetic(16, tail), grad, param, adamw, dtypes)
            seed = next(seeds)
            arithmetic = Arithmetic(WIDTHS[seed % len(WIDTHS)], tail)
            differ += compared_between_guards(arithmetic, grad, param, adamw, dtypes, seed=seed)
    others = {
        f"{one} is not {other}": len(compared(one, other, torch.float32, None, True))
        for one, other in permutations((Arithmetic(1, tail) for tail in Tail), 2)
    }
    answer({"differ": differ, "others": others})


if __name__ == "__main__":
    with np.errstate(all="ignore"):
        main()
