"""Read and write states and parameters where users' scripts do: after a step, or between a forward and its backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from typing import Any
from unittest import mock

import torch
from deepspeed import comm as dist
from deepspeed import zero
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

SMALL = 0.01
"""The value to write. A larger one makes fp16 overflow; a skipped step discards prefetches that still read masters."""

Results = list[list[torch.Tensor] | None]

Accessing = Callable[[], AbstractContextManager[Results]]


def after_each_step(access: Callable[[Any], Any]) -> Accessing:
    """Call ``access`` with the optimizer after each step, before the next forward. The context yields the results."""
    return _accessing("step", access, before=False)


def before_each_backward(access: Callable[[Any], Any]) -> Accessing:
    return _accessing("backward", access, before=True)


def after_each_backward(access: Callable[[Any], Any]) -> Accessing:
    return _accessing("backward", access, before=False)


def abandoning() -> AbstractContextManager[Results]:
    backwards = count()

    def read_and_abandon(optimizer: Any) -> None:
        assert optimizer.get_fp32_grad_partitions()
        if next(backwards) % 2:
            optimizer.zero_grad()

    return after_each_backward(read_and_abandon)()


def _accessing(name: str, access: Callable[[Any], Any], *, before: bool) -> Accessing:
    method = getattr(DeepSpeedEngine, name)

    @contextmanager
    def accessing() -> Iterator[Results]:
        results: Results = []

        def call_and_access(self: Any, *args: Any, **kwargs: Any) -> Any:
            if before:
                results.append(access(self.optimizer))
            returned = method(self, *args, **kwargs)
            if not before:
                results.append(access(self.optimizer))
            return returned

        with mock.patch.object(DeepSpeedEngine, name, call_and_access):
            yield results

    return accessing


def read_masters(optimizer: Any) -> list[torch.Tensor]:
    return [master.sum() for master in optimizer.fp32_partitioned_groups_flat]


def read_moments(optimizer: Any) -> list[torch.Tensor]:
    return [state["exp_avg"].sum() for state in optimizer.state.values()]


def read_parameters(optimizer: Any) -> list[torch.Tensor]:
    return [param.sum() for param in optimizer.fp16_partitioned_groups_flat]


def read_gathered(optimizer: Any) -> list[torch.Tensor]:
    params = _params(optimizer)
    with zero.GatheredParameters(params):
        return [param.sum() for param in params]


def read_persistent(optimizer: Any) -> list[torch.Tensor]:
    return [param.sum() for param in optimizer.persistent_parameters]


READS = (read_persistent, read_masters, read_moments, read_parameters, read_gathered)


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
    for param in _params(optimizer):
        param.ds_tensor.data.mul_(0.5)


def write_masters(optimizer: Any) -> None:
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
