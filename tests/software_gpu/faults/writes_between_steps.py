"""Write parameters where users' scripts do: between a step and the next forward, which must read the new values."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed import zero
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

SMALL = 0.01
"""The value to write. A larger one makes fp16 overflow; a skipped step discards prefetches that still read masters."""


def write_gathered(optimizer: Any) -> None:
    """Multiply every parameter by 0.5 on rank 0, from which DeepSpeed broadcasts it."""
    params = _params(optimizer)
    with zero.GatheredParameters(params, modifier_rank=0):
        if dist.get_rank() == 0:
            for param in params:
                param.data.mul_(0.5)


def write_and_partition(optimizer: Any) -> None:
    """Multiply every parameter by 0.5 on every rank, without the context of ``GatheredParameters``."""
    params = _params(optimizer)
    params[0].all_gather(params)
    for param in params:
        param.data.mul_(0.5)
    params[0].partition(params, has_been_updated=True)


def write_partitions(optimizer: Any) -> None:
    """Multiply this rank's partitions by 0.5 in place."""
    for param in _params(optimizer):
        param.ds_tensor.data.mul_(0.5)


def write_masters(optimizer: Any) -> None:
    """Set the masters that all ranks share equally: DeepSpeed 0.19.8 cannot set others."""
    for param in _params(optimizer):
        if param.ds_numel % dist.get_world_size() == 0:
            value = torch.full(param.ds_shape, SMALL, device=get_accelerator().current_device_name())
            safe_set_full_fp32_param(param, value)


def write_local_masters(optimizer: Any) -> None:
    for param in _params(optimizer):
        value = torch.full(param.ds_tensor.shape, SMALL, device=get_accelerator().current_device_name())
        safe_set_local_fp32_param(param, value)


def _params(optimizer: Any) -> list[Any]:
    return [param for group in optimizer.fp16_groups for param in group]


WRITES = (write_gathered, write_and_partition, write_partitions, write_masters, write_local_masters)
