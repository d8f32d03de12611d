"""Rank 1 cannot make its engine, after threads were bound and memory was taken; then both can, but not destroy it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from deep_opt_states.config import Config
from deep_opt_states.host.cores import CoreShare
from deep_opt_states.runtime.state_memory import StateMemory
from deep_opt_states.zero import stage3
from deep_opt_states.zero.internals.agreement import RanksDisagree
from deep_opt_states.zero.start.core_share import share_cores
from deep_opt_states.zero.start.devices import AcceleratorChoice
from tests.zero.parity.arm import make_engine
from tests.zero.parity.case import STRIDE_2, Case
from tests.zero.process_group import process_group

CASE = Case(name="unmade", blocks=(STRIDE_2,), world_size=2, steps=1)


class NoRoom(Exception):
    pass


class Unwell(Exception):
    pass


def affinities() -> set[frozenset[int]]:
    return {frozenset(os.sched_getaffinity(int(task.name))) for task in Path("/proc/self/task").iterdir()}


def bound(config: Config, accelerator: AcceleratorChoice) -> CoreShare:
    """As on CUDA: the update on the last of this rank's CPUs, everything else on the first."""
    cpus = sorted(os.sched_getaffinity(0))
    return replace(share_cores(config, accelerator), threads=1, cores=(cpus[-1],), launch_cores=(cpus[0],))


def no_room(memory: StateMemory) -> None:
    if dist.get_rank() == 1:
        raise NoRoom("for the states")


def main() -> None:
    free = affinities()
    with mock.patch.object(stage3, "share_cores", bound):
        failure = RanksDisagree if dist.get_rank() == 0 else NoRoom
        with mock.patch.object(StateMemory, "lock", no_room), pytest.raises(failure, match="for the states"):
            make_engine(CASE, STRIDE_2)
        assert affinities() == free, affinities()
        engine = make_engine(CASE, STRIDE_2)
    assert affinities() != free
    optimizer = engine.optimizer
    with mock.patch.object(DeepSpeedZeroOptimizer_Stage3, "destroy", side_effect=Unwell), pytest.raises(Unwell):
        optimizer.destroy()
    assert affinities() == free, affinities()
    assert not optimizer.optimizer.state
    print("made", flush=True)


if __name__ == "__main__":
    with process_group():
        main()
