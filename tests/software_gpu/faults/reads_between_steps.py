"""Read states and parameters where users' scripts do: after a step, or between a forward and its backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch
from deepspeed import zero
from deepspeed.runtime.engine import DeepSpeedEngine

Results = list[list[torch.Tensor] | None]
"""The results of the calls of an access: the sums of the tensors that it has read, or None if it writes."""


def after_each_step(access: Callable[[Any], Any]) -> Callable[[], AbstractContextManager[Results]]:
    """Call ``access`` with the optimizer after each step, before the next forward. The context yields the results."""
    step = DeepSpeedEngine.step

    @contextmanager
    def accessing() -> Iterator[Results]:
        results: Results = []

        def step_and_access(self: Any, *args: Any) -> None:
            step(self, *args)
            results.append(access(self.optimizer))

        with mock.patch.object(DeepSpeedEngine, "step", step_and_access):
            yield results

    return accessing


def before_each_backward(access: Callable[[Any], Any]) -> Callable[[], AbstractContextManager[Results]]:
    """Call ``access`` with the optimizer after each forward, before its backward. The context yields the results."""
    backward = DeepSpeedEngine.backward

    @contextmanager
    def accessing() -> Iterator[Results]:
        results: Results = []

        def access_and_backward(self: Any, *args: Any, **kwargs: Any) -> Any:
            results.append(access(self.optimizer))
            return backward(self, *args, **kwargs)

        with mock.patch.object(DeepSpeedEngine, "backward", access_and_backward):
            yield results

    return accessing


def read_masters(optimizer: Any) -> list[torch.Tensor]:
    return [master.sum() for master in optimizer.fp32_partitioned_groups_flat]


def read_moments(optimizer: Any) -> list[torch.Tensor]:
    return [state["exp_avg"].sum() for state in optimizer.state.values()]


def read_parameters(optimizer: Any) -> list[torch.Tensor]:
    return [param.sum() for param in optimizer.fp16_partitioned_groups_flat]


def read_gathered(optimizer: Any) -> list[torch.Tensor]:
    params = [param for group in optimizer.fp16_groups for param in group]
    with zero.GatheredParameters(params):
        return [param.sum() for param in params]


def read_persistent(optimizer: Any) -> list[torch.Tensor]:
    """Read the persistent parameters in place: DeepSpeed keeps them gathered."""
    return [param.sum() for param in optimizer.persistent_parameters]


READS = (read_persistent, read_masters, read_moments, read_parameters, read_gathered)
