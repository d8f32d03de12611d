"""Train stock and the plugin in lockstep, and compare all readable values after each step and each write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.runtime.zero.offload_states import get_state_devices
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
    safe_update_full_grad_vectorized,
)

from tests.ranks import on_ranks
from tests.zero.on_accelerator import GROUPS, on_accelerator
from tests.zero.parity.case import Case
from tests.zero.parity.parity_model import batch
from tests.zero.parity.training import make_engine, real_numel

CASE = Case(
    name="readers",
    blocks=({"placement": "stride", "update_stride": 2},),
    clip=0.2,
    world_size=2,
    widths=(20, 53, 42, 37, 24),
)

STATES = ("exp_avg", "exp_avg_sq")
Values = list[tuple[str, torch.Tensor]]


def readings(engine: Any, partitions: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all values that DeepSpeed's readers return for the engine."""
    for name, param in engine.module.named_parameters():
        yield f"fp32 of {name}", safe_get_full_fp32_param(param)
        yield f"grad of {name}", safe_get_full_grad(param)
        yield f"local fp32 of {name}", real_part(param, safe_get_local_fp32_param(param))
        yield f"local grad of {name}", real_part(param, safe_get_local_grad(param))
        for key in STATES:
            yield f"{key} of {name}", safe_get_full_optimizer_state(param, key)
            yield f"local {key} of {name}", real_part(param, safe_get_local_optimizer_state(param, key))
        with deepspeed.zero.GatheredParameters(param):
            yield f"16-bit {name}", param.data.clone()
    if not partitions:
        return
    for group, grads in engine.optimizer.get_fp32_grad_partitions().items():
        for index, grad in grads.items():
            param = engine.optimizer.fp16_groups[group][index]
            yield f"partition {group} {index}", real_part(param, grad)


def real_part(param: Any, partition: torch.Tensor) -> torch.Tensor:
    """Return the partition without the padding after the last rank's elements."""
    return partition.flatten()[: real_numel(param)]


def compare(when: str, engines: list[Any], partitions: bool) -> None:
    """Check that both engines return the same values.

    ``partitions``: compare the gradient partitions, too. Only their caller may write to them; other readers only read.
    """
    stock, ours = ([(name, tensor.clone()) for name, tensor in readings(engine, partitions)] for engine in engines)
    assert len(stock) == len(ours) > 40
    for (name, expected), (_, found) in zip(stock, ours, strict=True):
        assert expected.device == found.device, f"{when}: {name} is on {found.device}, with stock on {expected.device}"
        assert torch.equal(expected, found), f"{when}: {name} differs"
    stock_on, ours_on = (
        {state: get_state_devices(engine, state) for state in OffloadStateTypeEnum} for engine in engines
    )
    assert stock_on == ours_on


def backward(engine: Any, step: int) -> None:
    x, target = batch(CASE, dist.get_rank(), step, torch.bfloat16)
    engine.backward(engine(on_accelerator(x), on_accelerator(target), None, 1.0))


def params(engine: Any) -> list[Any]:
    return list(engine.module.parameters())


def params_without_padding(engine: Any) -> list[Any]:
    """Return the parameters that the ranks share equally, as DeepSpeed's setters of full values require."""
    even = [param for param in params(engine) if param.ds_numel % 2 == 0]
    assert len(even) >= 4
    return even


def set_full(engine: Any) -> None:
    for param in params_without_padding(engine):
        value = torch.linspace(-0.1, 0.1, param.ds_numel).view(param.ds_shape)
        safe_set_full_fp32_param(param, value)
        safe_set_full_optimizer_state(param, value.abs(), "exp_avg_sq")
        safe_set_full_grad(param, value / 8)


def set_local(engine: Any) -> None:
    for param in params(engine):
        value = torch.full_like(param.ds_tensor, 0.05, dtype=torch.float32)
        safe_set_local_fp32_param(param, value)
        safe_set_local_optimizer_state(param, value, "exp_avg")
        safe_set_local_grad(param, value)


def set_vectorized(engine: Any) -> None:
    safe_update_full_grad_vectorized(params_without_padding(engine), lambda grad, param: grad * 0.5)


@pytest.mark.parametrize("on", GROUPS)
def test_deepspeeds_readers_and_writers_see_the_bits_of_stock(on: str) -> None:
    """Check them also right after ``step()``."""
    on_ranks(2, compare_readers, group=GROUPS[on])


def compare_readers() -> None:
    engines = [make_engine(CASE, None), make_engine(CASE, CASE.blocks[0])]
    assert "streamed" in str(engines[1].optimizer.plan)
    writers: list[Callable[[Any], None] | None] = [None, set_full, set_local, set_vectorized, None]
    for step, write in enumerate(writers):
        partitions = step % 2 == 1
        for engine in engines:
            backward(engine, step)
        if step > 0:
            compare(f"after backward {step}", engines, partitions)
        if write is not None:
            for engine in engines:
                write(engine)
            compare(f"after {write.__name__}", engines, partitions)
        for engine in engines:
            engine.step()
        compare(f"after step {step}", engines, partitions)
