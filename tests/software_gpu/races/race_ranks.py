"""Train on the device under its race check, and print the races and the differences from a run on the CPU accelerator.

Arguments: ``quick``, ``cases``, or the seeds of random cases. Rank 0 prints one answer per training, with the results
of all ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from tests.launch import answer
from tests.software_gpu import device
from tests.software_gpu.faults import accesses
from tests.software_gpu.faults.accesses import READS, WRITES, after_each_step, before_each_backward
from tests.software_gpu.plugged import plugged
from tests.software_gpu.racecheck import take_races
from tests.software_gpu.ranks import software_process_group
from tests.software_gpu.settings import Settings
from tests.zero.parity.case import (
    CPU,
    NO_THROUGHPUT_TIMER,
    SERIAL,
    STREAMED,
    STRIDE_2,
    WITHOUT_BACKWARD_OVERLAP,
    WITHOUT_FORWARD_OVERLAP,
    Case,
    eager,
)
from tests.zero.parity.cases import ALL_ON_DISK, CASES, DEPARTURES, OFFLOADED_MIX, ON_DISK, QUICK
from tests.zero.parity.random_case import random_case
from tests.zero.parity.training import Block, Record, closing_engine, differences, run_variant, shared_folder, train
from tests.zero.random_plans import MoveCounts, random_moves

MAX_STEPS = 14

STEADY_STEPS = 7
"""The steps after which a case without moves repeats its accesses, unless it loads a checkpoint later: losses that
overflow and micro-batches without a gradient, of each position in a window, are in the first seven."""

OVERLAP_CHANGES = (SERIAL, {}, WITHOUT_BACKWARD_OVERLAP, {}, WITHOUT_FORWARD_OVERLAP, {})
"""Changes of the blocks, in turn: every other case has no overlap of one or both kinds. Overlap is the default."""

Context = Callable[[], AbstractContextManager[object]]

_REFERENCES: dict[str, Record] = {}


def checked(case: Case, block: Block, context: Context = nullcontext) -> tuple[dict[str, Any], Record]:
    """Train the case on the device under its race check, inside ``context``, and return what it has shown."""
    case = replace(case, extra={**case.extra, **NO_THROUGHPUT_TIMER})
    with plugged(Settings(racecheck=True)), context(), shared_folder() as folder:
        with closing_engine(case, block) as engine:
            schedule = "" if block is None else str(engine.optimizer.plan.schedule)
            record = train(engine, case, folder)
        device.synchronize()
        return {"block": block, "schedule": schedule, "races": gather_from_ranks(take_races())}, record


def reference(case: Case, block: Block) -> Record:
    """Return the record of the case on the CPU accelerator. Its name and its other blocks do not change it."""
    key = repr((replace(case, name="", blocks=()), block))
    if key not in _REFERENCES:
        _REFERENCES[key] = run_variant(case, block)
    return _REFERENCES[key]


def run_case(case: Case, block: Block, context: Context = nullcontext, *, expected: Record | None = None) -> None:
    """Train the case in ``context``, and answer with the races and the differences, by default from stock."""
    expected = expected or reference(case, None)
    result, record = checked(case, block, context)
    found = gather_from_ranks(differences(expected, record))
    answer_on_rank_0({"case": case.name, **result, "differences": found})


def gather_from_ranks(value: Any) -> list[Any]:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def answer_on_rank_0(result: dict[str, Any]) -> None:
    if dist.get_rank() == 0:
        answer(result)


def short_cases(cases: Sequence[Case]) -> Iterator[Case]:
    """Yield those of this world size, with ``STEADY_STEPS`` steps, or two after a checkpoint was loaded."""
    # Cases with hpZ come last: DeepSpeed keeps its process groups, and later engines would gather with them, too.
    for case in sorted(cases, key=lambda case: "zero_hpz_partition_size" in case.zero):
        if case.world_size == dist.get_world_size() and (case.reload is None or case.reload[1] < MAX_STEPS):
            loaded_after = 0 if case.reload is None else case.reload[1]
            yield replace(case, steps=min(case.steps, max(STEADY_STEPS, loaded_after + 2)))


def run_cases(cases: Sequence[Case], *, one_of: int = 1) -> None:
    """Check every kind of access between steps, moves, the first case, and one of ``one_of`` of the others."""
    first, *others = short_cases(cases)
    # After a skipped step, a write would conflict with the prefetch of that step, whose result is never read.
    few = replace(first, blocks=(), steps=4, poisoned={})
    for read, block in zip(READS, cycle((CPU, STREAMED, STRIDE_2)), strict=False):
        run_case(replace(few, name=f"{read.__name__} after each step"), block, after_each_step(read))
    for write, block in zip(WRITES, cycle((CPU, STREAMED, {**STRIDE_2, **WITHOUT_FORWARD_OVERLAP})), strict=False):
        run_written(replace(few, name=f"{write.__name__} after each step"), block, after_each_step(write))
    # Backward gathers the parameters again that forward has gathered.
    between = replace(few, name="between forward and backward", zero={**first.zero, "stage3_max_reuse_distance": 0})
    run_written(between, STREAMED, before_each_backward(accesses.write_partitions))
    one_bucket = {"sub_group_size": 10**6, "zero": {"reduce_bucket_size": 10**6}}
    abandoned = replace(few, name="abandoned gradients", accumulation=1, caller_accumulates=True, **one_bucket)
    with accesses.abandoning()():
        expected = run_variant(abandoned, STRIDE_2)
    run_case(abandoned, STRIDE_2, accesses.abandoning(), expected=expected)
    moved = MoveCounts()
    for number, block in enumerate(({**STRIDE_2, **WITHOUT_BACKWARD_OVERLAP}, STRIDE_2)):
        # With a plan that updates everything on the CPU, no kernel for the GPU would be made.
        moving = replace(first, name=f"units move between steps, {number}", blocks=(), steps=MAX_STEPS)
        run_case(moving, block, partial(random_moves, number, moved, 1.0))
    answer_on_rank_0({"moved": moved.to_json_dict()})
    for block in (eager(CPU), eager(STRIDE_2)):
        run_case(replace(few, name="updates in backward"), block)
    on_disk = replace(ON_DISK, name="states on disk", schedule=False, clip=0.5, world_size=first.world_size, steps=4)
    run_case(on_disk, ALL_ON_DISK)
    for overlap_comm in (True, False):
        name = f"a layer with three gradients per backward, overlap_comm {overlap_comm}"
        repeated = replace(few, name=name, steps=3, uses_of_shared=3, zero={"overlap_comm": overlap_comm})
        run_case(repeated, STRIDE_2, expected=reference(repeated, STRIDE_2))
    # Stock's gathers do not wait for the caller's writes. When they do, the plugin's wait is no longer needed.
    stock, _ = checked(few, None, after_each_step(accesses.write_gathered))
    answer_on_rank_0({"stock after a write": stock["races"]})
    departures = {departure.name for departure in DEPARTURES}
    for number, case in enumerate((first, *others[::one_of])):
        block = {**case.blocks[number % len(case.blocks)], **OVERLAP_CHANGES[number % len(OVERLAP_CHANGES)]}
        # Where the plugin departs from stock, the reference is the plugin on the CPU accelerator.
        run_case(case, block, expected=reference(case, block if case.name in departures else None))
    for case in [case for case in (first, *others) if case.offload_param][:: 2 * one_of - 1]:
        run_case(case, OFFLOADED_MIX)


def run_written(case: Case, block: Block, writing: Context) -> None:
    """Run a case whose script writes, also with stock."""
    with writing():
        expected = run_variant(case, None)
    run_case(case, block, writing, expected=expected)


def main(arguments: list[str]) -> None:
    # DeepSpeed's CPU accelerator returns False on some CPUs, but trains fp16 on all of them.
    get_accelerator().is_fp16_supported = lambda: True
    if arguments == ["quick"]:
        run_cases(QUICK, one_of=4)
    elif arguments == ["cases"]:
        run_cases((*CASES, *DEPARTURES))
    else:
        for argument in arguments:
            case = random_case(int(argument), dist.get_world_size())
            for block in case.blocks:
                run_case(case, block)


if __name__ == "__main__":
    with software_process_group():
        main(sys.argv[1:])
