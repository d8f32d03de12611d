"""Writes of users' scripts between a step and the next forward, which must read what was written."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed import zero
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

SMALL = 0.01
"""No larger, or fp16 overflows: a step that is skipped discards its prefetches, which still read masters."""


def write_gathered(optimizer: Any) -> None:
    """Halve every parameter on rank 0, from where DeepSpeed broadcasts it."""
    params = _params(optimizer)
    with zero.GatheredParameters(params, modifier_rank=0):
        if dist.get_rank() == 0:
            for param in params:
                param.data.mul_(0.5)


def write_and_partition(optimizer: Any) -> None:
    """Halve every parameter on every rank, without a context."""
    params = _params(optimizer)
    params[0].all_gather(params)
    for param in params:
        param.data.mul_(0.5)
    params[0].partition(params, has_been_updated=True)


def write_partitions(optimizer: Any) -> None:
    """Halve this rank's partitions in place."""
    for param in _params(optimizer):
        param.ds_tensor.data.mul_(0.5)


def write_masters(optimizer: Any) -> None:
    """Set masters that all ranks have a whole share of: DeepSpeed 0.19.8 cannot set others."""
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
