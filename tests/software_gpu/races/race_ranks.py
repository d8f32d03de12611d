"""Train on the device under its race check, and print the races and the differences from a run on the CPU accelerator.

Arguments: ``quick``, ``cases``, or random cases, each a seed with the names of simplifications: ``17`` or
``17,two_steps,bf16``. Rank 0 prints one answer per case, with the results of all ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from operator import attrgetter
from typing import Any

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from tests.launch import answer
from tests.software_gpu import device
from tests.software_gpu.faults.reads_between_steps import READS, after_each_step, before_each_backward
from tests.software_gpu.faults.writes_between_steps import WRITES, write_gathered, write_partitions
from tests.software_gpu.plugged import plugged
from tests.software_gpu.racecheck import take_races
from tests.software_gpu.ranks import software_process_group
from tests.software_gpu.settings import Settings
from tests.zero.moves.move_counts import MoveCounts
from tests.zero.moves.random_plans import random_moves
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
from tests.zero.parity.random_case import simplified
from tests.zero.parity.training import Block, Record, closing_engine, differences, run_variant, shared_folder, train

MAX_STEPS = 14

STEADY_STEPS = 7
"""The steps after which a case without moves repeats its accesses, unless it loads a checkpoint later.

DeepSpeed records the order of its gathers in the first step, and prefetches by it from the second step on. Losses that
overflow and micro-batches without a gradient, of each position in a window, are in the first seven steps.
"""

OVERLAP_CHANGES = (
    SERIAL,
    {},
    WITHOUT_BACKWARD_OVERLAP,
    {},
    WITHOUT_FORWARD_OVERLAP,
    {},
)
"""Changes of the blocks, in turn: every other case has no overlap of one or both kinds. Overlap is the default."""

Seeded = Callable[[], AbstractContextManager[object]]


@dataclass
class CheckedRun:
    """The results of one training run under the race check."""

    races: list[str]
    trained: Record
    schedule: str


def checked(case: Case, block: Block, context: AbstractContextManager[object] | None = None) -> CheckedRun:
    """Train the case on the device under its race check, inside ``context``."""
    case = replace(case, extra={**case.extra, **NO_THROUGHPUT_TIMER})
    with plugged(Settings(racecheck=True)), context or nullcontext(), shared_folder() as folder:
        with closing_engine(case, block) as engine:
            schedule = "" if block is None else str(engine.optimizer.plan.schedule)
            trained = train(engine, case, folder)
        device.synchronize()
        return CheckedRun(take_races(), trained, schedule)


def gather_from_ranks(value: Any) -> list[Any]:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def short_cases(cases: Sequence[Case]) -> Iterator[Case]:
    """Yield those of this world size, with ``STEADY_STEPS`` steps, or two after a checkpoint was loaded.

    Cases with hpZ come last: DeepSpeed keeps its process groups, and later engines would gather with them, too.
    """
    for case in sorted(cases, key=lambda case: "zero_hpz_partition_size" in case.zero):
        if case.world_size == dist.get_world_size() and (case.reload is None or case.reload[1] < MAX_STEPS):
            loaded_after = 0 if case.reload is None else case.reload[1]
            yield replace(case, steps=min(case.steps, max(STEADY_STEPS, loaded_after + 2)))


def run_case(case: Case, blocks: tuple[Block, ...], reference: Block, context: Seeded = nullcontext) -> None:
    """Train the case with each block, in ``context``, and answer with the races and with the differing bits.

    The expected bits come from a run of the block ``reference`` on the CPU accelerator.
    """
    with context():
        expected = run_variant(case, reference)
    for block in blocks:
        run = checked(case, block, context())
        result = {
            "case": case.name,
            "block": block,
            "schedule": run.schedule,
            "races": gather_from_ranks(run.races),
            "differences": gather_from_ranks(differences(expected, run.trained)),
        }
        answer_on_rank_0(result)


def answer_on_rank_0(result: dict[str, Any]) -> None:
    if dist.get_rank() == 0:
        answer(result)


def run_cases(cases: Sequence[Case], *, one_of: int = 1) -> None:
    """Check every kind of access between steps, moves, the first case, and one of ``one_of`` of the others."""
    first, *others = short_cases(cases)
    others = others[::one_of]
    for read, placement in zip(READS, cycle((CPU, STREAMED, STRIDE_2)), strict=False):
        reads = replace(first, name=f"{read.__name__} after each step", blocks=(), steps=4)
        run_case(reads, (placement,), reference=placement, context=after_each_step(read))
    for write, placement in zip(WRITES, cycle((CPU, STREAMED, {**STRIDE_2, **WITHOUT_FORWARD_OVERLAP})), strict=False):
        # After a skipped step, a write would conflict with the prefetch of that step, whose result is never read.
        writes = replace(first, name=f"{write.__name__} after each step", blocks=(), steps=4, poisoned={})
        run_case(writes, (placement,), reference=None, context=after_each_step(write))
    between = replace(
        first,
        name="partitions written between forward and backward",
        blocks=(),
        steps=4,
        poisoned={},
        # Backward gathers the parameters again that forward has gathered.
        zero={**first.zero, "stage3_max_reuse_distance": 0},
    )
    run_case(between, (STREAMED,), reference=None, context=before_each_backward(write_partitions))
    moved = MoveCounts()
    for number, block in enumerate(({**STRIDE_2, **WITHOUT_BACKWARD_OVERLAP}, STRIDE_2)):
        # With a plan that updates everything on the CPU, no kernel for the GPU would be made.
        moving = replace(first, name=f"units move between steps, {number}", blocks=(), steps=MAX_STEPS)
        run_case(moving, (block,), reference=None, context=partial(random_moves, number, moved, 1.0))
    answer_on_rank_0({"moved": moved.to_json_dict()})
    for block in (eager(CPU), eager(STRIDE_2)):
        speculated = replace(first, name="updates in backward", blocks=(), steps=STEADY_STEPS)
        run_case(speculated, (block,), reference=None)
    on_disk = replace(ON_DISK, name="states on disk", schedule=False, clip=0.5, world_size=first.world_size, steps=4)
    run_case(on_disk, (ALL_ON_DISK,), reference=None)
    for case in filter(attrgetter("offload_param"), (first, *others)):
        run_case(case, (OFFLOADED_MIX,), reference=None)
    for overlap_comm in (True, False):
        repeated = replace(
            first,
            name=f"a layer with three gradients per backward, overlap_comm {overlap_comm}",
            blocks=(),
            steps=3,
            poisoned={},
            uses_of_shared=3,
            zero={"overlap_comm": overlap_comm},
        )
        run_case(repeated, (STRIDE_2,), reference=STRIDE_2)
    run_case(first, (None,), reference=None)
    # Stock's gathers do not wait for the caller's writes. When they do, the plugin's wait is no longer needed.
    with after_each_step(write_gathered)():
        answer_on_rank_0({"stock after a write": checked(first, None).races})
    for number, case in enumerate((first, *others)):
        # Where the plugin departs from stock, the reference is the plugin on the CPU accelerator.
        is_departure = case.name in {departure.name for departure in DEPARTURES}
        block = case.blocks[number % len(case.blocks)]
        block = {**block, **OVERLAP_CHANGES[number % len(OVERLAP_CHANGES)]}
        run_case(case, (block,), reference=block if is_departure else None)


def main(arguments: list[str]) -> None:
    # DeepSpeed's CPU accelerator returns False on some CPUs, but trains fp16 on all of them.
    get_accelerator().is_fp16_supported = lambda: True
    if arguments == ["quick"]:
        run_cases(QUICK, one_of=2)
    elif arguments == ["cases"]:
        run_cases((*CASES, *DEPARTURES))
    else:
        for argument in arguments:
            seed, *names = argument.split(",")
            case = simplified(int(seed), dist.get_world_size(), names)
            run_case(case, case.blocks, reference=None)


if __name__ == "__main__":
    with software_process_group():
        main(sys.argv[1:])
