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
from itertools import pairwise, permutations, product
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from deep_opt_states.device.kernels import triton_kernel
from deep_opt_states.device.kernels.adam import BF16_MASTERS, BF16_STATES, FP32_STATES, ElementRange, StateDtypes
from deep_opt_states.device.kernels.arithmetic import Arithmetic, Tail
from deep_opt_states.device.kernels.fused import FusedAdam
from deep_opt_states.device.kernels.triton_adam import BlockShape, TritonAdam
from tests.kernels.adam_steps import (
    BETAS,
    STEP,
    copied,
    differences,
    in_dtypes,
    random_tensors,
    with_infinities,
)
from tests.kernels.fp32_operations import fused_multiply_add
from tests.launch import answer

GRADS = (torch.float32, torch.bfloat16, torch.float16)
PARAMS = (None, torch.float32, torch.bfloat16, torch.float16)
LENGTHS = (63, 64, 65, 4111)
"""Lengths of less than one block, one block, and more. Blocks have 64 elements, or 4096 to cover many kinds of
numbers."""


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
    for arithmetic, *options in cases():
        differ += compared(arithmetic, arithmetic, *options)
    for tail, dtypes, grad in product(Tail, (BF16_MASTERS, BF16_STATES), GRADS[:2]):
        for param, adamw in ((torch.bfloat16, True), (None, False)):
            differ += compared(Arithmetic(16, tail), Arithmetic(16, tail), grad, param, adamw, dtypes)
    others = {
        f"{one} is not {other}": len(compared(one, other, torch.float32, None, True))
        for one, other in permutations((Arithmetic(1, tail) for tail in Tail), 2)
    }
    answer({"differ": differ, "others": others})


if __name__ == "__main__":
    with np.errstate(all="ignore"):
        main()
