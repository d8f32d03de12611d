"""The GPU kernel beside the CPU kernel, on the same inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from deep_opt_states.device.kernels.adam import AdamStep, AdamTensors
from deep_opt_states.device.kernels.arithmetic import Arithmetic
from deep_opt_states.device.kernels.fused import FusedAdam
from deep_opt_states.device.kernels.triton_adam import TritonAdam
from tests.kernels.training import (
    BETAS,
    copied,
    differences,
    machine_arithmetic,
    random_tensors,
    with_infinities,
)


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def on_gpu(tensors: AdamTensors) -> AdamTensors:
    """A copy."""
    return tensors.each(lambda its: its.to(device(), copy=True))


def on_cpu(tensors: AdamTensors) -> AdamTensors:
    return tensors.each(torch.Tensor.cpu)


def triton_adam(*, adamw: bool = True, arithmetic: Arithmetic | None = None) -> TritonAdam:
    return TritonAdam(arithmetic or machine_arithmetic(), BETAS, adamw=adamw, device=device())


def train_both(
    steps: Sequence[AdamStep],
    numel: int,
    grad_dtype: torch.dtype,
    param_dtype: torch.dtype | None,
    *,
    adamw: bool = True,
    arithmetic: Arithmetic | None = None,
    seed: int = 0,
    infinities: bool = False,
    placed: Callable[[AdamTensors], AdamTensors] = on_gpu,
) -> list[str]:
    """What differs after any of the steps; ``placed`` copies the tensors to the GPU."""
    arithmetic = arithmetic or machine_arithmetic()
    theirs, gradient = random_tensors(numel, grad_dtype, param_dtype, seed)
    ours = placed(copied(theirs))
    gpu = triton_adam(adamw=adamw, arithmetic=arithmetic)
    cpu = FusedAdam(arithmetic, BETAS, adamw=adamw, num_threads=4)
    for step in steps:
        grad = with_infinities(gradient(), step.step) if infinities else gradient()
        theirs.grad.copy_(grad)
        ours.grad.copy_(grad)
        for kernel, tensors in ((gpu, ours), (cpu, theirs)):
            kernel.begin_step([step])
            kernel.update(0, tensors)
        if found := differences(on_cpu(ours), theirs):
            return [f"step {step.step}", *found]
    return []
