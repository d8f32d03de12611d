"""The kernels of training, ours and stock's, outside of training.

Those of the CPU raise what DeepSpeed raises where it cannot build its op. The first call on a machine builds it, and
ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from deep_opt_states.device.kernels.adam import AdamKernel

BETAS = (0.9, 0.999)

CpuAdam: TypeAlias = Callable[[int, int, Sequence[int]], AdamKernel]
"""Makes a kernel for a number of sub-groups and one of threads, the i-th pinned to the i-th of the logical CPUs that
are given; none is pinned where none are given."""


def training_cpu_adam(num_sub_groups: int, num_threads: int, cores: Sequence[int]) -> AdamKernel:
    from deep_opt_states.device.kernels.choice import cpu_adam

    return cpu_adam(num_sub_groups, BETAS, adamw=True, num_threads=num_threads, cores=cores).kernel


def training_gpu_adam() -> AdamKernel:
    """Compiled for what the probe updates. Raises ``KernelUnavailable``."""
    from deep_opt_states.device.kernels.choice import gpu_adam

    kernel = gpu_adam(BETAS, adamw=True)
    kernel.compile([torch.bfloat16], [torch.bfloat16])
    return kernel


def stock_cpu_adam(num_sub_groups: int) -> AdamKernel:
    """Stock's three passes, with as many threads as PyTorch has; the gradient, fp32, is scaled in place."""
    from deep_opt_states.device.kernels.stock import StockAdam

    class StockPasses(StockAdam):
        def scaled_gradient(self, grad: torch.Tensor, grad_scale: float) -> torch.Tensor:
            assert grad.dtype == torch.float32
            return grad.mul_(grad_scale)

    return StockPasses(num_sub_groups, BETAS, adamw=True)
