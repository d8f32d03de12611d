"""Check that ranks share the cores of a node under a real launcher."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from deep_opt_states.host import machine
from deep_opt_states.host.machine import cores_of
from tests.launch import Finished, environment, free_port, run_together


def torchrun(*arguments: str) -> Finished:
    """Run two ranks. torchrun sets OMP_NUM_THREADS=1 for each, since the variable is not set."""
    env = environment()
    del env["OMP_NUM_THREADS"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    command = [*launcher, *rendezvous, "-m", "tests.zero.start.core_share_ranks", *arguments]
    (finished,) = run_together([command], free_port(), 200, [env])
    assert finished.returncode == 0, finished.output[-4000:]
    return finished


def answers(finished: Finished) -> list[Any]:
    assert len(finished.answers()) == 2, finished.output[-4000:]
    return sorted(finished.answers())


def test_the_single_omp_thread_of_torchrun_does_not_limit_the_update() -> None:
    finished = torchrun("{}", "--pretend")
    assert answers(finished) == [
        [0, "1", 6, [8, 9, 10, 11, 12, 13], [14, 15, 30, 31]],
        [1, "1", 6, [0, 1, 2, 3, 4, 5], [6, 7, 22, 23]],
    ]
    line = (
        "[deep_opt_states] CPU update on rank 0: 6 threads on CPU 8-13, all others of the process on CPU 14-15,30-31 "
        "(8 of 16 physical cores, on NUMA node 1 like its GPU); OMP_NUM_THREADS=1 is for PyTorch's operations"
    )
    assert finished.output.count(line) == 1
    assert finished.output.count("CPU update on rank") == 1


def test_with_the_cpu_accelerator_ranks_share_the_cores_without_binding() -> None:
    cores = len(cores_of(os.sched_getaffinity(0)))
    quota = machine.cores().quota
    limit = cores if quota is None else min(cores, int(quota))
    found = answers(torchrun("{}"))
    assert [rank[2] for rank in found] == [max(1, limit - limit // 2), max(1, limit // 2)]
    assert [rank[3:] for rank in found] == [[[], []]] * 2


def test_the_config_overrides_the_topology() -> None:
    block = json.dumps({"cpu_threads": 3, "bind_cores": False})
    assert [rank[2:] for rank in answers(torchrun(block, "--pretend"))] == [[3, [], []]] * 2


def test_too_many_threads_are_refused_on_every_rank() -> None:
    for refused in answers(torchrun(json.dumps({"cpu_threads": 33}), "--pretend")):
        assert refused.startswith("ConfigError: deep_optimizer_states.cpu_threads: must be at most the 32 CPUs")
