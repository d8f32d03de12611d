"""End ranks by SIGKILL while steps of eager units are speculated, or resume from the checkpoint that they left.

Arguments: a folder, then ``speculated`` or ``commit``, the moment of the kill, or ``resume``. Each rank that resumes
prints the differences between stock that resumes from the killed run's checkpoint, and from its own.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from perf_model.schedule.action import ActionKind
from tests.launch import answer
from tests.zero.parity.case import CPU, Case, eager
from tests.zero.parity.parity_model import batch
from tests.zero.parity.training import Block, Record, closing_engine, collect, differences
from tests.zero.process_group import process_group
from tests.zero.speculations import wait_for_speculations

CASE = Case(name="killed", blocks=(eager(CPU),), world_size=2)
SAVED, STEPS = 3, 5
"""The number of steps before the last checkpoint, and of all steps."""


def kill(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def backward(engine: Any, step: int) -> None:
    x, target = batch(CASE, dist.get_rank(), step, torch.bfloat16)
    engine.backward(engine(x, target, None, 1.0))


def train(engine: Any, first: int, steps: int) -> None:
    for step in range(first, steps):
        backward(engine, step)
        engine.step()


def train_and_be_killed(folder: Path, moment: str) -> None:
    with closing_engine(CASE, CASE.blocks[0]) as engine:
        train(engine, 0, SAVED)
        engine.save_checkpoint(str(folder))
        dist.barrier()
        backward(engine, SAVED)
        assert len(wait_for_speculations(engine)) > 2
        if moment == "speculated":
            kill()
        with mock.patch.dict(engine.optimizer._running.executor._issuer._run, {ActionKind.COMMIT: kill}):
            engine.step()
            engine.optimizer._update.wait()


def resumed(folder: Path, block: Block) -> Record:
    record = Record()
    with closing_engine(CASE, block) as engine:
        engine.load_checkpoint(str(folder))
        train(engine, SAVED, STEPS)
        collect(engine.optimizer, record)
    return record


def resume(folder: Path) -> None:
    with closing_engine(CASE, None) as engine:
        train(engine, 0, SAVED)
        engine.save_checkpoint(str(folder / "stock"))
    expected = resumed(folder / "stock", None)
    for moment in ("speculated", "commit"):
        for block in (None, CASE.blocks[0]):
            found = resumed(folder / moment, block)
            answer({"moment": moment, "block": block, "differences": differences(expected, found)})


if __name__ == "__main__":
    with process_group():
        if sys.argv[2] == "resume":
            resume(Path(sys.argv[1]))
        else:
            train_and_be_killed(Path(sys.argv[1]) / sys.argv[2], sys.argv[2])
