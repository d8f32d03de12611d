"""Let rank 1's engine fail to initialize, then both ranks' ``destroy`` fail, and check that no thread stays bound.

The initialization fails after threads were bound and memory was allocated.
"""

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
from deep_opt_states.zero.internals.agreement import RanksDisagree
from deep_opt_states.zero.start import assembly
from deep_opt_states.zero.start.devices import AcceleratorChoice
from deep_opt_states.zero.start.node_share import share_cores
from tests.zero.parity.case import STRIDE_2, Case
from tests.zero.parity.training import make_engine
from tests.zero.process_group import process_group

CASE = Case(name="unmade", blocks=(STRIDE_2,), world_size=2, steps=1)


class OutOfMemory(Exception):
    pass


class DestroyFailure(Exception):
    pass


def affinities() -> set[frozenset[int]]:
    """Return the different CPU affinities of the threads of this process."""
    return {frozenset(os.sched_getaffinity(int(task.name))) for task in Path("/proc/self/task").iterdir()}


def share_bound_cores(config: Config, accelerator: AcceleratorChoice) -> CoreShare:
    """Bind threads as on CUDA: the update to the last of this rank's CPUs, all other threads to the first."""
    cpus = sorted(os.sched_getaffinity(0))
    return replace(share_cores(config, accelerator), threads=1, cores=(cpus[-1],), launch_cores=(cpus[0],))


def fail_on_rank_1(memory: StateMemory) -> None:
    if dist.get_rank() == 1:
        raise OutOfMemory("for the states")


def main() -> None:
    free = affinities()
    with mock.patch.object(assembly, "share_cores", share_bound_cores):
        failure = RanksDisagree if dist.get_rank() == 0 else OutOfMemory
        with mock.patch.object(StateMemory, "lock", fail_on_rank_1), pytest.raises(failure, match="for the states"):
            make_engine(CASE, STRIDE_2)
        assert affinities() == free, affinities()
        engine = make_engine(CASE, STRIDE_2)
    assert affinities() != free
    optimizer = engine.optimizer
    with (
        mock.patch.object(DeepSpeedZeroOptimizer_Stage3, "destroy", side_effect=DestroyFailure),
        pytest.raises(DestroyFailure),
    ):
        optimizer.destroy()
    assert affinities() == free, affinities()
    assert not optimizer.optimizer.state
    print("all threads are free", flush=True)


if __name__ == "__main__":
    with process_group():
        main()
