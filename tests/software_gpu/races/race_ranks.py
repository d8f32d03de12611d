"""Train random cases on the device under its race check, and print the races and the differences from stock.

The arguments are seeds. Rank 0 prints one answer per training, with the results of all ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch.distributed as dist

from tests.launch import answer
from tests.software_gpu import device
from tests.software_gpu.plugged import plugged
from tests.software_gpu.racecheck import take_races
from tests.software_gpu.ranks import software_process_group
from tests.software_gpu.settings import Settings
from tests.zero.parity.case import NO_THROUGHPUT_TIMER, Case
from tests.zero.parity.random_case import random_case
from tests.zero.parity.training import (
    Block,
    Record,
    closing_engine,
    differences,
    gathered,
    run_variant,
    shared_folder,
    train,
)


def checked(
    case: Case, block: Block, script: Callable[[], AbstractContextManager[object]] = nullcontext
) -> tuple[Record, list[str], str]:
    """Train the case on the device under its race check, and return the record, the races and the schedule."""
    case = replace(case, extra={**case.extra, **NO_THROUGHPUT_TIMER})
    with plugged(Settings(racecheck=True)), script(), shared_folder() as folder:
        with closing_engine(case, block) as engine:
            schedule = "" if block is None else str(engine.optimizer.plan.schedule)
            record = train(engine, case, folder)
        device.synchronize()
        return record, take_races(), schedule


def main(arguments: list[str]) -> None:
    for argument in arguments:
        case = random_case(int(argument), dist.get_world_size())
        (block,) = case.blocks
        record, races, schedule = checked(case, block)
        found = differences(run_variant(case, None), record)
        result = {"races": gathered(races), "differences": gathered(found)}
        if dist.get_rank() == 0:
            answer({"case": case.name, "block": block, "schedule": schedule, **result})


if __name__ == "__main__":
    with software_process_group():
        main(sys.argv[1:])
