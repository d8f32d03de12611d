"""Check that units which move between steps, and between checkpoints, leave the bits of stock.

In some cases the user reads states and sets gradients between a backward, which begins with the moves, and its step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed import utils
from deepspeed.runtime.engine import DeepSpeedEngine

from tests.ranks import ranks
from tests.tiers import thorough
from tests.zero.parity.case import CPU, SERIAL, STREAMED, STRIDE_2, WITHOUT_BACKWARD_OVERLAP, Case
from tests.zero.parity.cases import TWO_DECAYS
from tests.zero.parity.parity_model import batch
from tests.zero.parity.training import (
    DTYPES,
    Block,
    Record,
    closing_engine,
    differences,
    real_numel,
    run_resumed,
    run_variant,
)
from tests.zero.random_plans import KINDS, MoveCounts, random_moves

CASES = (
    Case(name="bf16, clipping, reload", blocks=(CPU,), steps=20, clip=0.5, reload=(9, 12)),
    Case(
        name="fp16, overflows, accumulation 2, offloaded parameters",
        blocks=(STRIDE_2,),
        dtype="fp16",
        steps=12,
        accumulation=2,
        poisoned={3: 1e6},
        offload_param=True,
    ),
    Case(name="fp32, two groups, serial", blocks=({**CPU, **SERIAL},), dtype="fp32", steps=12, groups=TWO_DECAYS),
    Case(name="missing gradients", blocks=(CPU,), steps=12, sometimes=True, unused=True, frozen=True),
    Case(name="from and to checkpoints of stock", blocks=(CPU,), steps=8, clip=0.5, resume=True),
    Case(name="shared host memory", blocks=(CPU,), steps=18, shares_host_memory=True),
    Case(
        name="2 ranks, accumulation 3, clipping, reload",
        blocks=({**CPU, **WITHOUT_BACKWARD_OVERLAP},),
        world_size=2,
        steps=50,
        accumulation=3,
        clip=0.5,
        reload=(25, 30),
        # Wider layers are cut in more places.
        widths=(19, 90, 120, 90, 23),
        sub_group_size=6000,
    ),
    Case(name="2 ranks, from and to checkpoints of stock", blocks=(CPU,), world_size=2, clip=0.5, resume=True),
)
"""Cases in which random units move after every step."""


@contextmanager
def accesses_before_each_step(case: Case) -> Iterator[list[torch.Tensor]]:
    """Read states or set gradients before each step of an engine, in turn. The context yields what was read."""
    step = DeepSpeedEngine.step
    seen: list[torch.Tensor] = []

    def access_and_step(self: Any, *args: Any) -> None:
        if self.is_gradient_accumulation_boundary():
            seen.extend(tensor.detach().cpu().clone() for tensor in access(self, case))
        step(self, *args)

    with mock.patch.object(DeepSpeedEngine, "step", access_and_step):
        yield seen


def access(engine: Any, case: Case) -> list[torch.Tensor]:
    params = [param for param in engine.module.parameters() if param.requires_grad]
    match engine.global_steps % 4:
        case 1:
            keys = ("exp_avg", "exp_avg_sq")
            moments = [utils.safe_get_full_optimizer_state(param, key) for param in params for key in keys]
            return [*map(utils.safe_get_full_fp32_param, params), *moments]
        case 2:
            grads = [utils.safe_get_full_grad(param) for param in params]
            for param in params[::2]:
                changed: torch.Tensor = 0.5 * utils.safe_get_local_grad(param) + 0.01
                # Stock's norm counts the padding.
                changed[real_numel(param) :] = 0.0
                utils.safe_set_local_grad(param, changed)
            return grads
        case 3:
            with deepspeed.zero.GatheredParameters(params):
                gathered = [param.data.clone() for param in params]
            tensors = batch(case, dist.get_rank(), 99, DTYPES[case.dtype])
            engine.eval()
            with torch.no_grad():
                loss = engine(*(tensor.to(engine.device, non_blocking=True) for tensor in tensors), 1.0, 1.0)
            engine.train()
            return [*gathered, loss]
        case _:
            return []


def record_of(case: Case, saved_by: Block, block: Block) -> Record:
    """Train the case, and return the record, with all that was read if every parameter has a gradient."""
    if case.resume:
        return run_resumed(case, saved_by, block)
    if case.unused:
        return run_variant(case, block)
    with accesses_before_each_step(case) as seen:
        record = run_variant(case, block)
    assert len(seen) > 5 * case.steps
    record.tensors |= {f"access {number}": tensor for number, tensor in enumerate(seen)}
    return record


@pytest.mark.P1
@pytest.mark.P2
@pytest.mark.P4
@ranks(1, thorough(2), timeout_s=400)
def test_a_thousand_units_that_move_between_steps_leave_the_bits_of_stock() -> None:
    counts: list[MoveCounts] = []
    for case in (case for case in CASES if case.world_size == dist.get_world_size()):
        (block,) = case.blocks
        stock = record_of(case, None, None)
        counts.append(MoveCounts())
        # A case that resumes also transfers checkpoints.
        arms = ((None, block), (block, None), (block, block)) if case.resume else ((block, block),)
        with random_moves(2 + len(case.name), counts[-1], 1.0):
            for arm in arms:
                assert not differences(stock, record_of(case, *arm)), (case.name, arm)
    assert set().union(*(moved.kinds for moved in counts)) == KINDS, "every kind of move happens"
    assert sum(moved.kinds.total() for moved in counts) >= 1000
    for name in ("recut_plans", "evictions", "restorations"):
        assert sum(getattr(moved, name) for moved in counts) >= 5, name


@ranks(1)
def test_a_plan_that_is_set_in_part_ends_all_updates_unless_only_memory_is_missing() -> None:
    with closing_engine(Case(name="set in part", blocks=()), STREAMED) as engine:
        running = engine.optimizer._running
        running.evict()
        with mock.patch.object(running.executor, "load_plan", side_effect=[torch.OutOfMemoryError(), None]):
            assert not running.restore()
        assert running.is_evicted
        assert running.executor.failure is None
        error = RuntimeError("the driver refuses to lock memory")
        with mock.patch.object(running.executor, "load_plan", side_effect=error), pytest.raises(RuntimeError):
            running.restore()
        assert running.executor.failure is error
