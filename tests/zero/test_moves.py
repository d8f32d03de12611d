"""Check that training is bit-identical to stock if units move between steps, and between checkpoints."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.ranks import ranks
from tests.tiers import thorough
from tests.zero.parity.case import CPU, SERIAL, STREAMED, STRIDE_2, WITHOUT_BACKWARD_OVERLAP, Case
from tests.zero.parity.cases import TWO_DECAYS
from tests.zero.parity.training import closing_engine, differences, run
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
    Case(
        name="fp32, two groups, serial, missing gradients",
        blocks=({**CPU, **SERIAL},),
        dtype="fp32",
        steps=12,
        groups=TWO_DECAYS,
        sometimes=True,
        unused=True,
        frozen=True,
    ),
    Case(name="from and to checkpoints of stock", blocks=(CPU,), steps=8, clip=0.5, resume=True),
    Case(name="shared host memory", blocks=(CPU,), steps=26, shares_host_memory=True),
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


@pytest.mark.P1
@pytest.mark.P2
@pytest.mark.P4
@ranks(1, thorough(2), timeout_s=400)
def test_a_thousand_units_that_move_between_steps_stay_bit_identical_to_stock() -> None:
    counts: list[MoveCounts] = []
    for case in (case for case in CASES if case.world_size == dist.get_world_size()):
        (block,) = case.blocks
        stock = run(case, None, None)
        counts.append(MoveCounts())
        # A case that resumes also transfers checkpoints.
        arms = ((None, block), (block, None), (block, block)) if case.resume else ((block, block),)
        with random_moves(2 + len(case.name), counts[-1], 1.0):
            for arm in arms:
                assert not differences(stock, run(case, *arm)), (case.name, arm)
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
