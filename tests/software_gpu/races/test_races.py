"""Check that the whole engine has no race on the device, also where callers access states between steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any

import pytest
import torch.distributed as dist

from tests.ranks import ranks
from tests.software_gpu.faults import accesses
from tests.software_gpu.faults.accesses import READS, after_each_backward, after_each_step, before_each_backward
from tests.software_gpu.faults.missing_order import combined
from tests.software_gpu.races.race_ranks import checked
from tests.software_gpu.ranks import software_process_group
from tests.tiers import thorough
from tests.zero.parity.case import (
    SERIAL,
    STREAMED,
    STRIDE_2,
    WITHOUT_BACKWARD_OVERLAP,
    WITHOUT_FORWARD_OVERLAP,
    Case,
    eager,
)
from tests.zero.parity.cases import ALL_ON_DISK, CASES, DEPARTURES, OFFLOADED_MIX, ON_DISK
from tests.zero.parity.training import Block, Record, assert_same_bits, run_variant
from tests.zero.random_plans import KINDS, MoveCounts, random_moves

Script = Callable[[], AbstractContextManager[object]]
ACCESSED = Case(name="accesses", blocks=(), clip=0.5, accumulation=2, steps=8)
WRITES = (
    accesses.write_gathered,
    accesses.write_and_partition,
    accesses.write_masters,
    accesses.write_local_masters,
)
"""Writes after each step that wait for a deferred update. A write to a partition in place does not."""

MAX_STEPS, STEADY_STEPS = 14, 7
"""A case without moves repeats its accesses after the steady steps, unless it loads a checkpoint later: losses that
overflow and micro-batches without a gradient, of each position in a window, are in the first seven."""


def check(case: Case, block: Block, script: Script = nullcontext, expected: Record | None = None) -> None:
    case = replace(case, world_size=dist.get_world_size())
    record, races, _ = checked(case, block, script)
    assert races == [], f"{case.name}, {block}"
    if expected is not None:
        assert_same_bits(expected, record)


def trained(case: Case, block: Block, script: Script = nullcontext) -> Record:
    with script():
        return run_variant(replace(case, world_size=dist.get_world_size()), block)


def in_turn(accesses: tuple[Callable[[Any], Any], ...], place: Callable[..., Script] = after_each_step) -> Script:
    def script() -> AbstractContextManager[object]:
        turns = cycle(accesses)
        return place(lambda optimizer: next(turns)(optimizer))()

    return script


@pytest.mark.P1
@ranks(2, thorough(1), group=software_process_group, timeout_s=600)
def test_every_access_of_a_script_is_ordered_and_bit_identical_to_stock() -> None:
    stock = trained(ACCESSED, None)
    check(ACCESSED, STRIDE_2, in_turn(READS), stock)
    check(ACCESSED, eager(STRIDE_2), expected=stock)
    # After a skipped step, a write would conflict with the prefetch of that step, whose result is never read.
    in_place = accesses.write_partitions
    # Backward gathers the parameters again that forward has gathered.
    gathered_again = replace(ACCESSED, zero={"stage3_max_reuse_distance": 0})
    for case, block, script in (
        (ACCESSED, STRIDE_2, in_turn(WRITES)),
        (ACCESSED, {**STRIDE_2, **WITHOUT_FORWARD_OVERLAP}, after_each_step(in_place)),
        (gathered_again, STREAMED, before_each_backward(in_place)),
    ):
        check(case, block, script, trained(case, None, script))
    # Stock's gathers do not wait for the caller's writes; the plugin adds the wait (``zero/step/gathers.py``). With one
    # rank, each gather waits anyway.
    _, races, _ = checked(ACCESSED, None, after_each_step(accesses.write_gathered))
    assert bool(races) == (dist.get_world_size() > 1)
    one_bucket = {"sub_group_size": 10**6, "zero": {"reduce_bucket_size": 10**6}}
    abandoned = replace(ACCESSED, accumulation=1, caller_accumulates=True, **one_bucket)
    check(abandoned, STRIDE_2, accesses.abandoning, trained(abandoned, STRIDE_2, accesses.abandoning))


@pytest.mark.P1
@ranks(2, thorough(1), group=software_process_group, timeout_s=600)
def test_moves_of_units_and_reads_after_them_are_ordered_and_bit_identical_to_stock() -> None:
    """Read between backward, which begins with the moves, and the step."""
    moved = MoveCounts()
    # With a plan that updates everything on the CPU, no kernel for the GPU would be made.
    case = replace(ACCESSED, steps=MAX_STEPS)
    script = combined(partial(random_moves, 0, moved, 1.0), in_turn(READS, after_each_backward))
    check(case, STRIDE_2, script, trained(case, None))
    assert set(moved.kinds) == KINDS, "every kind of move is checked"
    assert min(moved.recut_plans, moved.evictions, moved.restorations) > 0


QUICK = (
    "2 ranks, fp32, offloaded parameters",
    "2 ranks, resume, fp16",
    "2 ranks, no gradient in some steps and some micro-batches",
    "2 ranks, ZeRO++ hpZ",
)

assert {case.name for case in (*CASES, *DEPARTURES)} >= {*QUICK}


def cases(every_case: bool) -> Iterator[tuple[Case, Block]]:
    """Yield parity cases of this world size, shortened, with one of their blocks, and others that have races easily."""
    repeated = replace(ACCESSED, name="a layer with three gradients per backward", steps=3, uses_of_shared=3)
    yield replace(repeated, zero={"overlap_comm": True}), STRIDE_2
    yield replace(ON_DISK, name="states on disk", schedule=False, clip=0.5, steps=4), ALL_ON_DISK
    if every_case:
        yield replace(repeated, zero={"overlap_comm": False}), STRIDE_2
    # Every other case has no overlap of one or both kinds. Overlap is the default.
    changes = cycle((SERIAL, {}, WITHOUT_BACKWARD_OVERLAP, {}, WITHOUT_FORWARD_OVERLAP, {}))
    # Cases with hpZ come last: DeepSpeed keeps its process groups, and later engines would also gather with them.
    for case in sorted((*CASES, *DEPARTURES), key=lambda case: "zero_hpz_partition_size" in case.zero):
        loaded_after = 0 if case.reload is None else case.reload[1]
        if case.world_size != dist.get_world_size() or loaded_after >= MAX_STEPS:
            continue
        short = replace(case, steps=min(case.steps, max(STEADY_STEPS, loaded_after + 2)))
        if every_case or case.name in QUICK:
            yield short, OFFLOADED_MIX if case.offload_param else {**case.blocks[0], **next(changes)}


@pytest.mark.P1
@pytest.mark.parametrize("every_case", [False, thorough(True)])
@ranks(2, thorough(1), group=software_process_group, timeout_s=600)
def test_every_access_of_the_engine_is_ordered(every_case: bool) -> None:
    for case, block in cases(every_case):
        check(case, block)
