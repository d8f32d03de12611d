"""The CPU kernel that training uses, outside of training."""

from __future__ import annotations

import torch

from deep_opt_states.device.kernels.adam import AdamKernel


def stock_cpu_adam(num_sub_groups: int) -> AdamKernel:
    """Raises what DeepSpeed raises where it cannot build the op; the first call on a machine builds it."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    from deep_opt_states.device.kernels.cpu_adam import CPUAdam

    return CPUAdam(DeepSpeedCPUAdam([torch.nn.Parameter(torch.zeros(1))]), num_sub_groups)
