"""Check that direct writes to parameters are logged, and no others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch.distributed as dist

from deep_opt_states.names import CHECK_SWITCH
from tests.ranks import ranks
from tests.zero.behaviour.behaviour_variant import BLOCK, BehaviourNet, BehaviourVariant, Seen, seen, train, unequal


def write_directly(engine: Any) -> None:
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


def writing(variant: BehaviourVariant, write: Callable[[Any], None]) -> Seen:
    # DeepSpeed gathers persistent parameters before the write, and with several ranks not again before forward.
    engine = variant.engine(BehaviourNet())
    for first, steps in ((0, 2), (2, 1)):
        yield from train(engine, steps, first=first)
        write(engine)
    yield from train(engine, 2, first=3)


def logged_by_training_with(write: Callable[[Any], None]) -> list[str]:
    logged: list[str] = []
    scenario = partial(writing, write=write)
    with mock.patch("deep_opt_states.log.warn_this_rank", logged.append):
        assert unequal(seen(scenario, None), seen(scenario, BLOCK)) == []
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
