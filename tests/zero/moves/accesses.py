"""Read states and set gradients between a backward, which begins with the moves, and its step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_grad,
    safe_set_local_grad,
)

from tests.zero.parity.case import Case
from tests.zero.parity.parity_model import batch
from tests.zero.parity.training import DTYPES, real_numel

Seen = list[torch.Tensor]


@contextmanager
def accesses_before_each_step(case: Case) -> Iterator[Seen]:
    """Read states or set gradients before each step of an engine, in turn. The context yields what was read."""
    step = DeepSpeedEngine.step
    seen: Seen = []

    def access_and_step(self: Any, *args: Any) -> None:
        if self.is_gradient_accumulation_boundary():
            seen.extend(tensor.detach().cpu().clone() for tensor in _access(self, case))
        step(self, *args)

    with mock.patch.object(DeepSpeedEngine, "step", access_and_step):
        yield seen


def _access(engine: Any, case: Case) -> Seen:
    params = [param for param in engine.module.parameters() if param.requires_grad]
    match engine.global_steps % 4:
        case 1:
            keys = ("exp_avg", "exp_avg_sq")
            moments = [safe_get_full_optimizer_state(param, key) for param in params for key in keys]
            return [*map(safe_get_full_fp32_param, params), *moments]
        case 2:
            grads = [safe_get_full_grad(param) for param in params]
            for param in params[::2]:
                safe_set_local_grad(param, _changed(param))
            return grads
        case 3:
            with deepspeed.zero.GatheredParameters(params):
                gathered = [param.data.clone() for param in params]
            return [*gathered, _evaluate(engine, case)]
        case _:
            return []


def _changed(param: Any) -> torch.Tensor:
    """Return another gradient of this rank's partition, with zeros in the padding, which counts in stock's norm."""
    value: torch.Tensor = 0.5 * safe_get_local_grad(param) + 0.01
    value[real_numel(param) :] = 0.0
    return value


def _evaluate(engine: Any, case: Case) -> torch.Tensor:
    x, target = (
        tensor.to(engine.device, non_blocking=True) for tensor in batch(case, dist.get_rank(), 99, DTYPES[case.dtype])
    )
    engine.eval()
    with torch.no_grad():
        loss: torch.Tensor = engine(x, target, 1.0, 1.0)
    engine.train()
    return loss
