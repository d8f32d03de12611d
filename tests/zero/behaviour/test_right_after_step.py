"""Read and change parameters and hyperparameters between ``step()`` and the next forward, with stock and the plugin.

Both engines train in lockstep on one rank, where a persistent parameter is the same memory that the update writes. The
updates are delayed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.kernels.intercepted import before_each_update
from tests.ranks import on_ranks
from tests.tiers import thorough
from tests.zero.on_accelerator import GROUPS, on_accelerator
from tests.zero.parity.case import CPU, STREAMED, STRIDE_2, Case
from tests.zero.parity.parity_model import batch
from tests.zero.parity.training import Block, assert_same_bits, make_engine
from tests.zero.races.delayed_ranks import delayed

ALL, SOME = 10**9, 50
"""Thresholds of the size up to which parameters are persistent."""

HYPERPARAMETERS = (
    {"lr": 1e-1, "betas": (0.5, 0.6), "eps": 1e-3, "weight_decay": 0.3},
    {"lr": 1e-4, "betas": (0.9, 0.999)},
)
"""Hyperparameters that differ much, so that an update with those of the next step would be noticed."""


def make_engines(block: Block, threshold: int) -> list[Any]:
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
    loss = engine(on_accelerator(x), on_accelerator(target), None, 1.0)
    engine.backward(loss)
    engine.step()
    return loss.detach()


def check_in_place_reads_and_writes(block: Block, threshold: int) -> None:
    engines = make_engines(block, threshold)
    num_persistent = {ALL: 8, SOME: 2}[threshold]
    for number in range(4):
        losses = [step(engine, number) for engine in engines]
        assert torch.equal(*losses), (block, threshold, number)
        assert engines[1].optimizer._update._executor.pending
        read = [[param.data.clone() for param in engine.module.parameters()] for engine in engines]
        assert sum(data.numel() > 0 for data in read[0]) == num_persistent
        for index, (expected, found) in enumerate(zip(*read, strict=True)):
            assert torch.equal(expected, found), (block, threshold, number, index)
        # Stock computes with the changed parameters until the next update.
        for engine in engines:
            for param in list(engine.module.parameters())[number % 2 :: 2]:
                param.data.mul_(1.5).add_(0.01)
    assert_same_bits(*engines)
    for engine in engines:
        engine.destroy()


@contextmanager
def counted(updated: list[int]) -> Iterator[None]:
    """Append the sub-groups that are updated inside this context to ``updated``."""
    with before_each_update(lambda update: updated.append(update.sub_group)):
        yield


def check_that_an_update_uses_the_hyperparameters_of_its_step(block: Block) -> None:
    engines = make_engines(block, SOME)
    after: list[int] = []
    for number in range(4):
        losses = [step(engine, number) for engine in engines]
        assert torch.equal(*losses), (block, number)
        for engine in engines:
            for group in engine.optimizer.param_groups:
                group.update(HYPERPARAMETERS[number % 2])
        with counted(after):
            engines[1].optimizer._update.wait()
    assert len(after) >= 4, "everything was updated before the hyperparameters changed"
    assert_same_bits(*engines)
    for engine in engines:
        engine.destroy()


@pytest.mark.parametrize("on", ["cpu", thorough("software_gpu")])
def test_in_place_access_and_changed_hyperparameters_between_steps_have_the_bits_of_stock(on: str) -> None:
    on_ranks(1, check_right_after_step, group=GROUPS[on])


def check_right_after_step() -> None:
    with delayed(1, update_s=0.03, layer_s=0):
        for block in (CPU, STRIDE_2, STREAMED):
            check_in_place_reads_and_writes(block, ALL)
            check_in_place_reads_and_writes(block, SOME)
        check_that_an_update_uses_the_hyperparameters_of_its_step(CPU)
        # The main thread updates the streamed units in the step. Enough units are left for the worker.
        check_that_an_update_uses_the_hyperparameters_of_its_step({**STRIDE_2, "update_stride": 4})
