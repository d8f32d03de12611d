"""Check what is logged of a script: direct writes to parameters, and no warning of PyTorch on its scheduler."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.ops.adam import DeepSpeedCPUAdam

from deep_opt_states.names import CHECK_SWITCH
from tests.ranks import ranks
from tests.zero.behaviour.behaviour_variant import BehaviourNet, BehaviourVariant, final_states, train, unequal
from tests.zero.parity.case import STRIDE_2, Case
from tests.zero.parity.parity_model import ParityNet, batch


def write_directly(engine: Any) -> None:
    """Write in place to one parameter on the last rank, assign memory to another, and write to a persistent one."""
    if dist.get_rank() == dist.get_world_size() - 1:
        engine.module.layers[1].weight.ds_tensor.data.mul_(0.5)
    partition = engine.module.layers[2].weight.ds_tensor
    partition.data = partition.data.clone().add_(0.25)
    engine.module.layers[3].bias.ds_tensor.data.zero_()


def write_gathered(engine: Any) -> None:
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
        if dist.get_rank() == 0:
            engine.module.layers[0].weight.data.mul_(0.5)


def write_to_flat_buffers(engine: Any) -> None:
    for flat in engine.optimizer.fp16_partitioned_groups_flat:
        flat.mul_(0.5)


WEIGHT = "the partition of layers.{}.weight must only be written to by a call that waits"


def logged_by_training_with(write: Callable[[Any], None]) -> list[str]:
    """Write after each of two steps: the bits must be those of stock. Return the lines that the plugin logs."""
    logged: list[str] = []
    found = []
    for block in (None, {"placement": "stride", "update_stride": 2}):
        torch.manual_seed(5)
        variant = BehaviourVariant(block)
        with mock.patch("deep_opt_states.log.warn_this_rank", logged.append):
            # DeepSpeed gathers persistent parameters before the write, and with several ranks not again before forward.
            engine = variant.engine(BehaviourNet())
            seen = list(train(engine, 2))
            write(engine)
            seen += train(engine, 1, first=2)
            write(engine)
            seen += [*train(engine, 2, first=3), *final_states(engine)]
        found.append(seen)
        variant.close()
    assert unequal(*found) == []
    return logged


@pytest.mark.P6
@ranks(2)
@mock.patch.dict("os.environ", {CHECK_SWITCH: "1"})
def test_direct_writes_are_named_once_and_known_writes_are_not() -> None:
    logged = logged_by_training_with(write_directly)
    layers = [1, 2] if dist.get_rank() == dist.get_world_size() - 1 else [2]
    assert len(logged) == len(layers)
    for line, layer in zip(logged, layers, strict=True):
        assert WEIGHT.format(layer) in line
        assert "modifier_rank" in line
    for write in (write_gathered, write_to_flat_buffers, lambda engine: None):
        assert logged_by_training_with(write) == []


@ranks(2)
def test_a_client_scheduler_is_stepped_without_a_warning() -> None:
    case = Case(name="client", blocks=(STRIDE_2,), world_size=2, schedule=False)
    config = case.ds_config(STRIDE_2)
    del config["optimizer"]
    model = ParityNet(case)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=DeepSpeedCPUAdam(model.parameters(), lr=1e-3),
            lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step),
            config=config,
        )
        for step in range(3):
            x, target = batch(case, dist.get_rank(), step, torch.bfloat16)
            engine.backward(engine(x, target, None, 1.0))
            engine.step()
    assert engine.get_lr() == [1e-3 / 8]
    assert [str(warning.message) for warning in caught if "lr_scheduler" in str(warning.message)] == []
