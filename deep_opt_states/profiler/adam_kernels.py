"""Create the Adam kernels of training, the plugin's and stock DeepSpeed's, outside of training.

The functions that create CPU kernels raise the error that DeepSpeed raises if it cannot build its op. The first call on
a machine compiles that op and the plugin's library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from deep_opt_states.device.kernels.adam import DEFAULT_BETAS, AdamKernel

CpuAdamFactory: TypeAlias = Callable[[int, int, Sequence[int]], AdamKernel]
"""A function that creates a CPU kernel from the number of sub-groups, the number of threads, and logical CPUs: thread i
is pinned to the i-th CPU; no thread is pinned if the sequence is empty."""


def training_cpu_adam(num_sub_groups: int, num_threads: int, cores: Sequence[int]) -> AdamKernel:
    """Return the CPU kernel that training uses; ``cores`` are the logical CPUs that its threads are pinned to."""
    from deep_opt_states.device.kernels.choice import cpu_adam

    return cpu_adam(num_sub_groups, DEFAULT_BETAS, adamw=True, num_threads=num_threads, cores=cores).kernel


def training_gpu_adam() -> AdamKernel:
    """Return the GPU kernel that training uses, compiled for bf16 gradients and parameters.

    Raise ``KernelUnavailable`` if there is no such kernel on this machine.
    """
    from deep_opt_states.device.kernels.choice import gpu_adam

    kernel = gpu_adam(DEFAULT_BETAS, adamw=True)
    kernel.compile([torch.bfloat16], [torch.bfloat16])
    return kernel


def stock_cpu_adam(num_sub_groups: int) -> AdamKernel:
    """Return stock's kernel of three passes, which runs on PyTorch's threads and scales the fp32 gradient in place."""
    from deep_opt_states.device.kernels.stock import StockAdam

    class StockPasses(StockAdam):
        def scaled_gradient(self, grad: torch.Tensor, grad_scale: float) -> torch.Tensor:
            assert grad.dtype == torch.float32
            return grad.mul_(grad_scale)

    return StockPasses(num_sub_groups, DEFAULT_BETAS, adamw=True)
