"""Compare the GPU kernel in Triton's interpreter with the CPU kernel, bit for bit.

This checks the source of the kernel, and not the code that a GPU executes. Some versions of Triton round the fused
multiply-add twice in the interpreter; this module replaces it by one that rounds once.
"""

from __future__ import annotations

from contextlib import nullcontext
from itertools import permutations
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from deep_opt_states.device.kernels import triton_kernel
from deep_opt_states.device.kernels.arithmetic import Arithmetic, Tail
from deep_opt_states.device.kernels.triton_adam import BlockShape
from tests.kernels.adam_steps import fused_multiply_add
from tests.kernels.compared import WIDTHS, cases, compared
from tests.ranks import ranks

LENGTHS = (63, 64, 65)


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
            small = compared(
                Arithmetic((16, 1)[seed % 2], tail), *options, seed=seed, numel=length, block=BlockShape(elements=64)
            )
            assert small == []
        for one, other in permutations((Arithmetic(1, tail) for tail in Tail), 2):
            assert compared(one, torch.float32, None, True, cpu_arithmetic=other), "another arithmetic has other bits"
