"""Train on the device under its race check, also random cases, which are compared with stock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch.distributed as dist

from tests.software_gpu import device
from tests.software_gpu.plugged import plugged
from tests.software_gpu.racecheck import take_races
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
    case = replace(case, extra={**case.extra, **NO_THROUGHPUT_TIMER})
    with plugged(Settings(racecheck=True)), script(), shared_folder() as folder:
        with closing_engine(case, block) as engine:
            schedule = "" if block is None else str(engine.optimizer.plan.schedule)
            record = train(engine, case, folder)
        device.synchronize()
        return record, take_races(), schedule


def check_random_cases(seeds: Sequence[int]) -> None:
    for seed in seeds:
        case = random_case(seed, dist.get_world_size())
        (block,) = case.blocks
        record, races, schedule = checked(case, block)
        found = gathered([*races, *differences(run_variant(case, None), record)])
        assert not any(found), f"{case.name}, {block}\n{schedule}\n{found}"
