"""Run the GPU kernel and the CPU kernel on the same inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from deep_opt_states.device.kernels.adam import AdamStep, AdamTensors
from deep_opt_states.device.kernels.arithmetic import Arithmetic
from deep_opt_states.device.kernels.fused import FusedAdam
from deep_opt_states.device.kernels.triton_adam import TritonAdam
from tests.kernels.adam_steps import (
    BETAS,
    copied,
    differences,
    machine_arithmetic,
    random_tensors,
    with_infinities,
)


def device() -> torch.device:
    """Return the current GPU."""
    return torch.device("cuda", torch.cuda.current_device())


def on_gpu(tensors: AdamTensors) -> AdamTensors:
    """Return copies of the tensors on the GPU."""
    return tensors.map(lambda tensor: tensor.to(device(), copy=True))


def on_cpu(tensors: AdamTensors) -> AdamTensors:
    """Return the tensors in host memory."""
    return tensors.map(torch.Tensor.cpu)


def triton_adam(*, adamw: bool = True, arithmetic: Arithmetic | None = None) -> TritonAdam:
    """Return the GPU kernel with this machine's arithmetic, or with another."""
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
    """Train with both kernels and return the differences after the first step with any.

    ``placed`` copies the tensors to the GPU.
    """
    arithmetic = arithmetic or machine_arithmetic()
    cpu_tensors, gradient = random_tensors(numel, grad_dtype, param_dtype, seed)
    gpu_tensors = placed(copied(cpu_tensors))
    gpu = triton_adam(adamw=adamw, arithmetic=arithmetic)
    cpu = FusedAdam(arithmetic, BETAS, adamw=adamw, num_threads=4)
    for step in steps:
        grad = with_infinities(gradient(), step.step) if infinities else gradient()
        cpu_tensors.grad.copy_(grad)
        gpu_tensors.grad.copy_(grad)
        for kernel, tensors in ((gpu, gpu_tensors), (cpu, cpu_tensors)):
            kernel.begin_step([step])
            kernel.update(0, tensors)
        if found := differences(on_cpu(gpu_tensors), cpu_tensors):
            return [f"step {step.step}", *found]
    return []
