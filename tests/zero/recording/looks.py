"""What users' scripts look at between a step and the next forward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from deepspeed import zero
from deepspeed.runtime.engine import DeepSpeedEngine

from tests.zero.recording.missing_order import patched


def after_each_step(look: Callable[[Any], object]) -> Callable[[], AbstractContextManager[object]]:
    """A user's script that looks at the optimizer before the next forward."""
    step = DeepSpeedEngine.step

    def looked_at(self: Any, *args: Any) -> None:
        step(self, *args)
        look(self.optimizer)

    return patched(DeepSpeedEngine, "step", looked_at)


def before_each_backward(look: Callable[[Any], object]) -> Callable[[], AbstractContextManager[object]]:
    """A user's script that looks at the optimizer between a forward and its backward."""
    backward = DeepSpeedEngine.backward

    def looked_at(self: Any, *args: Any, **kwargs: Any) -> Any:
        look(self.optimizer)
        return backward(self, *args, **kwargs)

    return patched(DeepSpeedEngine, "backward", looked_at)


def look_at_masters(optimizer: Any) -> None:
    for master in optimizer.fp32_partitioned_groups_flat:
        master.sum()


def look_at_moments(optimizer: Any) -> None:
    for state in optimizer.state.values():
        state["exp_avg"].sum()


def look_at_parameters(optimizer: Any) -> None:
    for param in optimizer.fp16_partitioned_groups_flat:
        param.sum()


def look_at_gathered(optimizer: Any) -> None:
    params = [param for group in optimizer.fp16_groups for param in group]
    with zero.GatheredParameters(params):
        for param in params:
            param.sum()


def look_at_kept(optimizer: Any) -> None:
    """DeepSpeed keeps them gathered."""
    for param in optimizer.persistent_parameters:
        param.sum()


LOOKS = (look_at_kept, look_at_masters, look_at_moments, look_at_parameters, look_at_gathered)
