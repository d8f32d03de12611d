"""Trains on the recording accelerator, and says what was found.

Arguments: ``cases``, ``faults``, or random cases, each a seed with what to simplify: ``17`` or ``17,two_steps,bf16``.
Rank 0 prints an answer for each, of all ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import cycle
from operator import attrgetter
from typing import Any

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from tests.launch import answer
from tests.zero.parity.arm import Block, Record, closing_engine, differences, run_arm, shared_folder, train
from tests.zero.parity.case import AT_ONCE, CPU, NOT_AHEAD, SERIAL, STREAMED, STREAMED_ONE_SLOT, STRIDE_2, Case
from tests.zero.parity.cases import CASES, DEPARTURES, OFFLOADED_MIX
from tests.zero.parity.random_case import simplified
from tests.zero.process_group import process_group
from tests.zero.recording.faults import FAULTS, Fault
from tests.zero.recording.looks import LOOKS, after_each_step, before_each_backward
from tests.zero.recording.names import name_memories
from tests.zero.recording.recorder import UNORDERED, Recorder
from tests.zero.recording.recording import recording
from tests.zero.recording.writes import WRITES, write_gathered, write_partitions
from tests.zero.slots_beyond import FREE, room_for_slots

MAX_STEPS = 14

NO_THROUGHPUT_TIMER = {"timers": {"throughput": {"enabled": False}}}
"""The timer synchronises the device twice a step, from the third one on, and would hide what is looked for."""


WITHOUT_OVERLAP = (
    SERIAL,
    {},
    NOT_AHEAD,
    {},
    AT_ONCE,
    {},
)
"""In every other case; with it is the default."""

Seeded = Callable[[], AbstractContextManager[object]]


@dataclass
class Recording:
    recorder: Recorder
    trained: Record
    schedule: str


def record(case: Case, block: Block, seeded: AbstractContextManager[object] | None = None) -> Recording:
    case = replace(case, extra={**case.extra, **NO_THROUGHPUT_TIMER})
    with recording() as recorder, seeded or nullcontext(), shared_folder() as folder:
        with closing_engine(case, block) as engine:
            schedule = ""
            if block is not None:
                name_memories(recorder, engine.optimizer)
                schedule = str(engine.optimizer.plan.schedule)
            trained = train(engine, case, folder)
        return Recording(recorder, trained, schedule)


def of_all_ranks(value: Any) -> list[Any]:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def short_cases() -> Iterator[Case]:
    """Yield hpZ's last: DeepSpeed keeps its process groups, by which the engines after it gather, too."""
    for case in sorted((*CASES, *DEPARTURES), key=lambda case: "zero_hpz_partition_size" in case.zero):
        if case.world_size == dist.get_world_size() and (case.reload is None or case.reload[1] < MAX_STEPS):
            yield replace(case, steps=min(case.steps, MAX_STEPS))


def run_case(case: Case, blocks: tuple[Block, ...], reference: Block, look: Seeded = nullcontext) -> None:
    """``reference`` is the block of the arm, run as usual, that has the bits to be met."""
    with look():
        expected = run_arm(case, reference)
    for block in blocks:
        done = record(case, block, look())
        result = {
            "case": case.name,
            "block": block,
            "schedule": done.schedule,
            "findings": of_all_ranks([asdict(finding) for finding in done.recorder.findings]),
            "differences": of_all_ranks(differences(expected, done.trained)),
            "lanes": sorted(done.recorder.seen),
        }
        say(result)


def run_fault(fault: Fault) -> None:
    findings = record(fault.case, fault.block, fault.seeded()).recorder.findings
    say({"fault": fault.name, "shown": sum(map(fault.shown_by, findings))})


def say(result: dict[str, Any]) -> None:
    if dist.get_rank() == 0:
        answer(result)


def run_cases() -> None:
    first, *others = short_cases()
    for look, placement in zip(LOOKS, cycle((CPU, STREAMED, STRIDE_2)), strict=False):
        looked_at = replace(first, name=f"{look.__name__} after each step", blocks=(), steps=4)
        run_case(looked_at, (placement,), reference=placement, look=after_each_step(look))
    for write, placement in zip(WRITES, cycle((CPU, STREAMED, {**STRIDE_2, **AT_ONCE})), strict=False):
        # After a skipped step a write would meet the prefetch of that step, whose result nobody reads.
        written = replace(first, name=f"{write.__name__} after each step", blocks=(), steps=4, poisoned={})
        run_case(written, (placement,), reference=None, look=after_each_step(write))
    between = replace(
        first,
        name="partitions written between forward and backward",
        blocks=(),
        steps=4,
        poisoned={},
        # Backward gathers what forward has gathered.
        zero={**first.zero, "stage3_max_reuse_distance": 0},
    )
    run_case(between, (STREAMED,), reference=None, look=before_each_backward(write_partitions))
    growing = replace(first, name="slots added, and given back", blocks=(), steps=len(FREE) + 1)
    run_case(growing, (STREAMED_ONE_SLOT,), reference=STREAMED_ONE_SLOT, look=room_for_slots)
    for case in filter(attrgetter("offload_param"), short_cases()):
        run_case(case, (OFFLOADED_MIX,), reference=None)
    for overlap_comm in (True, False):
        repeated = replace(
            first,
            name=f"a layer whose gradient arrives three times, overlap_comm {overlap_comm}",
            blocks=(),
            steps=3,
            poisoned={},
            uses_of_shared=3,
            zero={"overlap_comm": overlap_comm},
        )
        run_case(repeated, (STRIDE_2,), reference=STRIDE_2)
    run_case(first, (None,), reference=None)
    # Stock's gathers do not wait for what the caller has written. When they do, ours need not.
    with after_each_step(write_gathered)():
        stock = record(first, None).recorder.findings
    say({"stock after a write": [asdict(finding) for finding in stock if finding.rule == UNORDERED]})
    for number, case in enumerate((first, *others)):
        # Where ours departs from stock, the reference is ours, run as usual.
        departs = case.name in {departure.name for departure in DEPARTURES}
        block = case.blocks[number % len(case.blocks)]
        block = {**block, **WITHOUT_OVERLAP[number % len(WITHOUT_OVERLAP)]}
        run_case(case, (block,), reference=block if departs else None)


def main(what: list[str]) -> None:
    # The CPU accelerator trains fp16, but says that it does not.
    get_accelerator().is_fp16_supported = lambda: True
    if what == ["cases"]:
        run_cases()
    elif what == ["faults"]:
        for fault in FAULTS:
            if fault.world_size == dist.get_world_size():
                run_fault(fault)
    else:
        for argument in what:
            seed, *names = argument.split(",")
            case = simplified(int(seed), dist.get_world_size(), names)
            run_case(case, case.blocks, reference=None)


if __name__ == "__main__":
    with process_group():
        main(sys.argv[1:])
