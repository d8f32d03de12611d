"""Build the commands, one per node, with which users start a training script with their framework on this machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from tests.launch import Finished, environment, free_port, run_ranks, run_together

Commands = Callable[[list[str], str, int], list[list[str]]]
"""A function of a script with its arguments, the path of the DeepSpeed config, and the port of the process group."""


def launch(commands: Commands, script: list[str], config: str, timeout_s: float) -> list[Finished]:
    """Run the script on all nodes, and return the finished processes."""
    port = free_port()
    nodes = commands(script, config, port)
    # Ranks without a launcher read the port from the environment. GPUs are hidden, because frameworks would use them.
    env = environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), CUDA_VISIBLE_DEVICES="")
    return run_together(nodes, port, timeout_s, [env] * len(nodes))


def two_ranks(program: str, folder: Path) -> list[Finished]:
    """Run the module ``program`` on two ranks, which save in ``folder``. Both must succeed."""
    # GPUs are hidden, because frameworks would use them.
    ranks = run_ranks(2, ["-m", program, str(folder)], 400, CUDA_VISIBLE_DEVICES="")
    # All of them are shown: the rank that failed first explains why the others lost their connection.
    failed = [f"rank {rank}: {done.output[-5000:]}" for rank, done in enumerate(ranks) if done.returncode != 0]
    assert not failed, "\n\n".join(failed)
    return ranks


def deepspeed_nodes(script: list[str], config: str, port: int) -> list[list[str]]:
    """Start the DeepSpeed launcher on each of two nodes (``--no_ssh``), with one rank per node."""
    hostfile = Path(config).with_name("hostfile")
    hostfile.write_text("node-0 slots=1\nnode-1 slots=1\n")
    nodes = ["--hostfile", str(hostfile), "--no_ssh", "--master_addr", "127.0.0.1"]
    arguments = [*script, "--deepspeed_config", config]
    return [[*_deepspeed(port), *nodes, "--node_rank", str(rank), *arguments] for rank in range(2)]


def deepspeed_ranks(script: list[str], config: str, port: int) -> list[list[str]]:
    """Start two ranks on one node with the DeepSpeed launcher."""
    return [[*_deepspeed(port), "--num_accelerators", "2", *script, "--deepspeed_config", config]]


def torchrun_nodes(script: list[str], config: str, port: int) -> list[list[str]]:
    """Start torchrun on each of two nodes, with one rank per node."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    meet = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    arguments = [*script, "--deepspeed_config", config]
    return [[*torchrun, *meet, "--node-rank", str(rank), *arguments] for rank in range(2)]


def accelerate(script: list[str], config: str, port: int) -> list[list[str]]:
    """Start one rank with ``accelerate launch``."""
    return [_accelerate(1, script, config, port)]


def accelerate_ranks(script: list[str], config: str, port: int) -> list[list[str]]:
    """Start two ranks with ``accelerate launch``."""
    return [_accelerate(2, script, config, port)]


def only_rank(script: list[str], config: str, port: int) -> list[list[str]]:
    """Start one rank without a launcher, but with a launcher's variables: the example would choose a port itself."""
    rank = ["env", "RANK=0", "LOCAL_RANK=0", "WORLD_SIZE=1", "LOCAL_SIZE=1"]
    return [[*rank, sys.executable, *script, "--deepspeed_config", config]]


def lightning(script: list[str], config: str, port: int) -> list[list[str]]:
    """Start one rank with Lightning."""
    return [[sys.executable, *script, "--deepspeed_config", config]]


def lightning_ranks(script: list[str], config: str, port: int) -> list[list[str]]:
    """Start two ranks with Lightning, which starts the second rank itself."""
    return [[sys.executable, *script, "--deepspeed_config", config, "--devices", "2"]]


def _deepspeed(port: int) -> list[str]:
    return [sys.executable, "-m", "deepspeed.launcher.runner", "--master_port", str(port)]


def _accelerate(ranks: int, script: list[str], config: str, port: int) -> list[str]:
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--use_deepspeed", "--num_processes", str(ranks)]
    return [*launch, "--main_process_port", str(port), "--deepspeed_config_file", config, *script]
