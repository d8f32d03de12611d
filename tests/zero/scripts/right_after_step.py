"""What a user sees and changes between ``step()`` and the next forward, on stock and on the plugin in lockstep.

One rank, where a parameter that DeepSpeed keeps gathered is the very memory that the update writes. Updates are late.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from tests.kernels.intercepted import before_each_update
from tests.zero.parity.arm import Block, Record, collect, differences, make_engine
from tests.zero.parity.case import CPU, STREAMED, STRIDE_2, Case
from tests.zero.parity.model import batch
from tests.zero.process_group import process_group
from tests.zero.scripts.delayed import delayed

ALL, SOME = 10**9, 50
"""Thresholds below which parameters are kept gathered."""

NUMBERS = ({"lr": 1e-1, "betas": (0.5, 0.6), "eps": 1e-3, "weight_decay": 0.3}, {"lr": 1e-4, "betas": (0.9, 0.999)})
"""Far apart: the update of one step with the next one's would show."""


def make_both(block: Block, threshold: int) -> list[Any]:
    case = Case(
        name="right after step",
        blocks=(),
        clip=0.5,
        schedule=False,
        zero={"stage3_param_persistence_threshold": threshold},
    )
    return [make_engine(case, None), make_engine(case, block)]


def step(engine: Any, number: int) -> torch.Tensor:
    case = Case(name="data", blocks=())
    x, target = batch(case, dist.get_rank(), number, torch.bfloat16)
    loss = engine(x, target, None, 1.0)
    engine.backward(loss)
    engine.step()
    return loss.detach()


def must_be_equal(engines: list[Any]) -> None:
    expected, found = Record(), Record()
    for engine, record in zip(engines, (expected, found), strict=True):
        collect(engine.optimizer, record)
        engine.destroy()
    assert differences(expected, found) == []


def data_is_updated_and_stays_as_written(block: Block, threshold: int) -> None:
    engines = make_both(block, threshold)
    kept = {ALL: 8, SOME: 2}[threshold]
    for number in range(4):
        losses = [step(engine, number) for engine in engines]
        assert torch.equal(*losses), (block, threshold, number)
        assert engines[1].optimizer._update._executor.pending
        read = [[param.data.clone() for param in engine.module.parameters()] for engine in engines]
        assert sum(data.numel() > 0 for data in read[0]) == kept
        for index, (expected, found) in enumerate(zip(*read, strict=True)):
            assert torch.equal(expected, found), (block, threshold, number, index)
        # Stock computes with this until the next update.
        for engine in engines:
            for param in list(engine.module.parameters())[number % 2 :: 2]:
                param.data.mul_(1.5).add_(0.01)
    must_be_equal(engines)


@contextmanager
def counted(updated: list[int]) -> Iterator[None]:
    """Appends the sub-groups that are updated inside."""
    with before_each_update(lambda update: updated.append(update.sub_group)):
        yield


def numbers_are_those_of_the_step_decided(block: Block) -> None:
    engines = make_both(block, SOME)
    after: list[int] = []
    for number in range(4):
        losses = [step(engine, number) for engine in engines]
        assert torch.equal(*losses), (block, number)
        for engine in engines:
            for group in engine.optimizer.param_groups:
                group.update(NUMBERS[number % 2])
        with counted(after):
            engines[1].optimizer._update.finish()
    assert len(after) >= 4, "everything was updated before the numbers changed"
    must_be_equal(engines)


if __name__ == "__main__":
    with process_group():
        with delayed(1, update_s=0.01, layer_s=0):
            for block in (CPU, STRIDE_2, STREAMED):
                data_is_updated_and_stays_as_written(block, ALL)
                data_is_updated_and_stays_as_written(block, SOME)
            numbers_are_those_of_the_step_decided(CPU)
            numbers_are_those_of_the_step_decided(STRIDE_2)
        print("equal right after step")
