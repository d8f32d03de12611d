"""End ranks by SIGKILL while steps of eager units are speculated, and resume from their last checkpoint."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from perf_model.schedule.action import ActionKind
from tests.ranks import ended_ranks, on_ranks
from tests.zero.parity.case import CPU, Case, eager
from tests.zero.parity.parity_model import batch
from tests.zero.parity.training import Block, Record, assert_same_bits, closing_engine, collect
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


@pytest.mark.promise("P4")
@pytest.mark.parametrize("moment", ["speculated", "commit"])
def test_ranks_that_are_killed_between_speculation_and_commit_resume_from_the_last_checkpoint(
    moment: str, tmp_path: Path
) -> None:
    killed = ended_ranks(2, partial(train_and_be_killed, tmp_path / "killed", moment), tmp_path)
    assert [finished.returncode for finished in killed] == [-signal.SIGKILL] * 2
    on_ranks(2, resume, tmp_path)


def resume(folder: Path) -> None:
    with closing_engine(CASE, None) as engine:
        train(engine, 0, SAVED)
        engine.save_checkpoint(str(folder / "stock"))
    stock = resumed(folder / "stock", None)
    for block in (None, CASE.blocks[0]):
        assert_same_bits(stock, resumed(folder / "killed", block))
