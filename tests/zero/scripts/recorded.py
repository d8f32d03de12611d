"""Trains on the recording accelerator, and says what was found.

Arguments: ``cases``, ``faults``, or the seeds of random cases. Rank 0 prints an answer for each, of all ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from typing import Any

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from tests.launch import answer
from tests.zero.parity.arm import Block, Record, closing_engine, differences, run_arm, shared_folder, train
from tests.zero.parity.case import Case
from tests.zero.parity.cases import CASES, DEPARTURES
from tests.zero.parity.random_case import random_case
from tests.zero.process_group import process_group
from tests.zero.recording.faults import FAULTS, name_memories
from tests.zero.recording.recorder import Recorder
from tests.zero.recording.recording import recording

MAX_STEPS = 14


def record(case: Case, block: Block, seeded: AbstractContextManager[object] | None = None) -> tuple[Recorder, Record]:
    with recording() as recorder, seeded or nullcontext(), shared_folder() as folder:
        with closing_engine(case, block) as engine:
            if block is not None:
                name_memories(recorder, engine.optimizer)
            trained = train(engine, case, folder)
        return recorder, trained


def of_all_ranks(value: Any) -> list[Any]:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def short_cases() -> Iterator[Case]:
    for case in (*CASES, *DEPARTURES):
        if case.world_size == dist.get_world_size() and (case.reload is None or case.reload[1] < MAX_STEPS):
            yield replace(case, steps=min(case.steps, MAX_STEPS))


def run_case(case: Case, blocks: tuple[Block, ...], reference: Block) -> None:
    """``reference`` is the block of the arm, run as usual, that has the bits to be met."""
    expected = run_arm(case, reference)
    for block in blocks:
        recorder, trained = record(case, block)
        result = {
            "case": case.name,
            "block": block,
            "findings": of_all_ranks([asdict(finding) for finding in recorder.findings]),
            "differences": of_all_ranks(differences(expected, trained)),
            "lanes": sorted(recorder.seen),
        }
        say(result)


def run_fault(name: str) -> None:
    fault = next(fault for fault in FAULTS if fault.name == name)
    recorder, _ = record(fault.case, fault.block, fault.seeded())
    say({"fault": name, "shown": sum(map(fault.shown_by, recorder.findings))})


def say(result: dict[str, Any]) -> None:
    if dist.get_rank() == 0:
        answer(result)


def main(what: list[str]) -> None:
    # The CPU accelerator trains fp16, but says that it does not.
    get_accelerator().is_fp16_supported = lambda: True
    if what == ["cases"]:
        for number, case in enumerate(short_cases()):
            # Where ours departs from stock, the reference is ours, run as usual.
            departs = case.name in {departure.name for departure in DEPARTURES}
            block = case.blocks[number % len(case.blocks)]
            run_case(case, (block,), reference=block if departs else None)
        run_case(case, (None,), reference=None)
    elif what == ["faults"]:
        for fault in FAULTS:
            if fault.world_size == dist.get_world_size():
                run_fault(fault.name)
    else:
        for seed in map(int, what):
            case = random_case(seed, dist.get_world_size())
            run_case(case, case.blocks, reference=None)


if __name__ == "__main__":
    with process_group():
        main(sys.argv[1:])
