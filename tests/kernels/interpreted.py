"""The GPU kernel in Triton's interpreter against the CPU kernel, bit for bit. Started by ``test_triton.py``.

The interpreter is numpy, whose operations on float32 are correctly rounded, but for the fused multiply-add, which some
versions of Triton round twice there: here it is one that rounds once. So this tests what the kernel says, and not what
a GPU makes of it.
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
from deep_opt_states.device.kernels.adam import Part
from deep_opt_states.device.kernels.arithmetic import Arithmetic, Tail
from deep_opt_states.device.kernels.fused import FusedAdam
from deep_opt_states.device.kernels.triton_adam import Block, TritonAdam
from tests.kernels.training import BETAS, STEP, copied, differences, random_tensors, with_infinities
from tests.launch import answer

GRADS = (torch.float32, torch.bfloat16, torch.float16)
PARAMS = (None, torch.float32, torch.bfloat16, torch.float16)
LENGTHS = (63, 64, 65, 4111)
"""Less than a block, a whole one, and more: of 64, and for the sake of many kinds of numbers of 4096."""


def fused_multiply_add(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """Exact to float64 rounded to odd, then to float32: twice that many bits and two suffice (Boldo, Melquiond)."""
    x, y, z = (np.asarray(its, dtype=np.float32).astype(np.float64) for its in (x, y, z))
    product_ = x * y  # exact: 48 bits
    total = product_ + z
    there = total - product_
    error = (product_ - (total - there)) + (z - there)
    even = np.asarray(total).view(np.int64) % 2 == 0
    inexact = np.isfinite(total) & np.isfinite(error) & (error != 0)
    odd = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return np.where(inexact & even, odd, total).astype(np.float32)


def create_fma(self: InterpreterBuilder, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
    return TensorHandle(fused_multiply_add(x.data, y.data, z.data), z.dtype.scalar)


def compared(
    gpu_arithmetic: Arithmetic,
    cpu_arithmetic: Arithmetic,
    grad_dtype: torch.dtype,
    param_dtype: torch.dtype | None,
    adamw: bool,
) -> list[str]:
    """What differs, over all lengths and two steps each."""
    found = []
    for numel in LENGTHS:
        ours, gradient = random_tensors(numel, grad_dtype, param_dtype, seed=numel)
        theirs = copied(ours)
        block = Block(elements=64 if numel < 1000 else 4096)
        gpu = TritonAdam(gpu_arithmetic, BETAS, adamw=adamw, device=torch.device("cpu"), block=block)
        cpu = FusedAdam(cpu_arithmetic, BETAS, adamw=adamw, num_threads=1)
        for number in (1, 2):
            grad = with_infinities(gradient(), seed=number) if numel == 65 else gradient()
            step = replace(STEP, step=number, weight_decay=0.0 if numel == 63 else 0.1)
            for kernel, tensors in ((gpu, ours), (cpu, theirs)):
                tensors.grad.copy_(grad)
                kernel.begin_step([step])
            cpu.update(0, theirs)
            # The second step in parts that cut blocks, vectors and the tail.
            borders = [0, numel] if number == 1 else sorted({0, 1, numel // 3, numel // 2 + 1, numel - 1, numel})
            for begin, end in pairwise(borders):
                part = Part(begin=begin, end=end, of=numel)
                gpu.update(0, ours.part(part), part)
            if differ := differences(ours, theirs):
                what = f"{cpu_arithmetic}, {grad_dtype}, {param_dtype}, adamw {adamw}"
                found.append(f"{what}, {numel} elements, step {number}: {', '.join(differ)}")
    return found


def cases() -> Iterator[tuple[Arithmetic, torch.dtype, torch.dtype | None, bool]]:
    """Yield every tail with every pair of dtypes.

    Dtypes matter only where the kernel loads and stores, so vector widths and kinds of decay take turns over them: each
    tail meets every width with every kind of decay, three times, with other dtypes.
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
    others = {
        f"{one} is not {other}": len(compared(one, other, torch.float32, None, True))
        for one, other in permutations((Arithmetic(1, tail) for tail in Tail), 2)
    }
    answer({"differ": differ, "others": others})


if __name__ == "__main__":
    with np.errstate(all="ignore"):
        main()
