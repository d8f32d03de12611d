"""Read states and parameters where users' scripts do: after a step, or between a forward and its backward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from deepspeed import zero
from deepspeed.runtime.engine import DeepSpeedEngine

from tests.zero.races.missing_order import patched


def after_each_step(access: Callable[[Any], object]) -> Callable[[], AbstractContextManager[object]]:
    """Call ``access`` with the optimizer after each step, before the next forward."""
    step = DeepSpeedEngine.step

    def step_and_access(self: Any, *args: Any) -> None:
        step(self, *args)
        access(self.optimizer)

    return patched(DeepSpeedEngine, "step", step_and_access)


def before_each_backward(access: Callable[[Any], object]) -> Callable[[], AbstractContextManager[object]]:
    """Call ``access`` with the optimizer after each forward, before its backward."""
    backward = DeepSpeedEngine.backward

    def access_and_backward(self: Any, *args: Any, **kwargs: Any) -> Any:
        access(self.optimizer)
        return backward(self, *args, **kwargs)

    return patched(DeepSpeedEngine, "backward", access_and_backward)


def read_masters(optimizer: Any) -> None:
    for master in optimizer.fp32_partitioned_groups_flat:
        master.sum()


def read_moments(optimizer: Any) -> None:
    for state in optimizer.state.values():
        state["exp_avg"].sum()


def read_parameters(optimizer: Any) -> None:
    for param in optimizer.fp16_partitioned_groups_flat:
        param.sum()


def read_gathered(optimizer: Any) -> None:
    params = [param for group in optimizer.fp16_groups for param in group]
    with zero.GatheredParameters(params):
        for param in params:
            param.sum()


def read_persistent(optimizer: Any) -> None:
    """Read the persistent parameters in place: DeepSpeed keeps them gathered."""
    for param in optimizer.persistent_parameters:
        param.sum()


READS = (read_persistent, read_masters, read_moments, read_parameters, read_gathered)
