"""Check that ranks share the cores of a node under a real launcher, which runs this module as a program."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch.distributed as dist

from deep_opt_states.config import ConfigError, parse_config
from deep_opt_states.device.cpu import HostDevice
from deep_opt_states.host import machine
from deep_opt_states.host.machine import Core, cores_of
from deep_opt_states.names import CONFIG_KEY
from deep_opt_states.zero.internals.agreement import RanksDisagree
from deep_opt_states.zero.start import node_share as cores
from deep_opt_states.zero.start.devices import AcceleratorChoice, choose_device
from deep_opt_states.zero.start.node_share import share_cores
from tests.launch import Finished, answer, environment, free_port, run_together
from tests.zero.process_group import process_group


def torchrun(*arguments: str) -> Finished:
    """Run two ranks. torchrun sets OMP_NUM_THREADS=1 for each, since the variable is not set."""
    env = environment()
    del env["OMP_NUM_THREADS"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    command = [*launcher, *rendezvous, "-m", "tests.zero.start.test_core_share", *arguments]
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


def main(block: str, pretend: bool) -> None:
    """Report this rank's share of the cores, with ``pretend`` on an emulated node with GPUs."""
    config = parse_config({CONFIG_KEY: json.loads(block)})
    assert config is not None
    accelerator = choose_device()
    if pretend:
        accelerator = AcceleratorChoice(HostDevice(), slots_on_host=False)
        node = tuple(Core(cpus=(cpu, cpu + 16), node=cpu // 8) for cpu in range(16))
        cores.cores_of = lambda allowed: node
        # Rank 0's GPU is on the last NUMA node.
        cores.gpu_node = lambda: dist.get_world_size() - 1 - dist.get_rank()
    try:
        share = share_cores(config, accelerator)
    except (ConfigError, RanksDisagree) as error:
        answer(f"{type(error).__name__}: {error}")
    else:
        omp = os.environ.get("OMP_NUM_THREADS")
        answer([dist.get_rank(), omp, share.threads, share.cores, share.launch_cores])


if __name__ == "__main__":
    with process_group():
        main(sys.argv[1], "--pretend" in sys.argv)
