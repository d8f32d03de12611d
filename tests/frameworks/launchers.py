"""How users start a training script with their framework on this machine: the commands, one a node."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from tests.launch import Finished, environment, free_port, run_together

Commands = Callable[[list[str], str, int], list[list[str]]]
"""Of a script and its arguments, the path of the DeepSpeed config, and a port where the ranks can meet."""


def launch(commands: Commands, script: list[str], config: str, timeout_s: float) -> list[Finished]:
    port = free_port()
    nodes = commands(script, config, port)
    # A rank that was started without a launcher finds its port here; and frameworks take a GPU wherever they see one.
    env = environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), CUDA_VISIBLE_DEVICES="")
    return run_together(nodes, port, timeout_s, [env] * len(nodes))


def deepspeed_nodes(script: list[str], config: str, port: int) -> list[list[str]]:
    """One rank each; ``--no_ssh``: the launcher is started on every node."""
    hostfile = Path(config).with_name("hostfile")
    hostfile.write_text("node-0 slots=1\nnode-1 slots=1\n")
    nodes = ["--hostfile", str(hostfile), "--no_ssh", "--master_addr", "127.0.0.1"]
    arguments = [*script, "--deepspeed_config", config]
    return [[*_deepspeed(port), *nodes, "--node_rank", str(rank), *arguments] for rank in range(2)]


def deepspeed_ranks(script: list[str], config: str, port: int) -> list[list[str]]:
    return [[*_deepspeed(port), "--num_accelerators", "2", *script, "--deepspeed_config", config]]


def torchrun_nodes(script: list[str], config: str, port: int) -> list[list[str]]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    meet = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    arguments = [*script, "--deepspeed_config", config]
    return [[*torchrun, *meet, "--node-rank", str(rank), *arguments] for rank in range(2)]


def accelerate(script: list[str], config: str, port: int) -> list[list[str]]:
    return [_accelerate(1, script, config, port)]


def accelerate_ranks(script: list[str], config: str, port: int) -> list[list[str]]:
    return [_accelerate(2, script, config, port)]


def only_rank(script: list[str], config: str, port: int) -> list[list[str]]:
    """Without a launcher, but with what one sets: the example would find a port of its own."""
    rank = ["env", "RANK=0", "LOCAL_RANK=0", "WORLD_SIZE=1", "LOCAL_SIZE=1"]
    return [[*rank, sys.executable, *script, "--deepspeed_config", config]]


def lightning(script: list[str], config: str, port: int) -> list[list[str]]:
    return [[sys.executable, *script, "--deepspeed_config", config]]


def lightning_ranks(script: list[str], config: str, port: int) -> list[list[str]]:
    """Lightning starts the other one itself."""
    return [[sys.executable, *script, "--deepspeed_config", config, "--devices", "2"]]


def _deepspeed(port: int) -> list[str]:
    return [sys.executable, "-m", "deepspeed.launcher.runner", "--master_port", str(port)]


def _accelerate(ranks: int, script: list[str], config: str, port: int) -> list[str]:
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--use_deepspeed", "--num_processes", str(ranks)]
    return [*launch, "--main_process_port", str(port), "--deepspeed_config_file", config, *script]
