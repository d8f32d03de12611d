"""Compare the kernel for GPUs with the CPU kernel, bit for bit, for difficult values and every kind of range."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle, pairwise, product

import torch

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
from tests.kernels.adam_steps import BETAS, GRADS, PARAMS, STEP, differences, difficult_tensors

NUMEL = 4 * 1024 + 77
BORDERS = (0, 1, 795, 3138, 3672, NUMEL - 1, NUMEL)
"""The borders of ranges. They begin and end at each distance from a multiple of 16 bytes."""

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
    block: BlockShape | None = None,
    device: str = "cpu",
) -> list[str]:
    """Return the differences for difficult values. The second step updates every other range, the others the whole."""
    gpu = TritonAdam(gpu_arithmetic, BETAS, adamw=adamw, device=torch.empty(0, device=device).device, block=block)
    cpu = FusedAdam(cpu_arithmetic or gpu_arithmetic, BETAS, adamw=adamw, num_threads=1)
    theirs, gradient = difficult_tensors(numel, grad_dtype, param_dtype, dtypes, seed)
    ours = theirs.map(lambda tensor: placed(tensor, device))
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
        on_host = ours.map(torch.Tensor.cpu)
        if wrong := [*differences(on_host, theirs), *wrong_nans(on_host)]:
            case = f"{gpu_arithmetic}, {dtypes}, {grad_dtype}, {param_dtype}, seed {seed}, adamw {adamw}, {numel}"
            found.append(f"{case}, step {step.step}: {', '.join(wrong)}")
    return found


def placed(tensor: torch.Tensor, device: str) -> torch.Tensor:
    offset = tensor.storage_offset()
    return torch.empty(offset + tensor.numel(), dtype=tensor.dtype, device=device)[offset:].copy_(tensor)


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
