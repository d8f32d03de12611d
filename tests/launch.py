"""Starts a Python program as N ranks on this machine and waits for them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass
class Finished:
    returncode: int
    output: str


def environment(**changes: str) -> dict[str, str]:
    """This process's environment, with the CPU accelerator and one thread a rank."""
    return {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), **changes}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_ranks(world_size: int, arguments: list[str], timeout_s: float, **changes: str) -> list[Finished]:
    """One process a rank, with the environment that a launcher sets.

    A rank that outlives the timeout, counted from the start of all, is killed; its return code is negative then.
    """
    shared = {
        "WORLD_SIZE": str(world_size),
        "LOCAL_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    processes = []
    for rank in range(world_size):
        env = environment(**shared, RANK=str(rank), LOCAL_RANK=str(rank), **changes)
        processes.append(
            subprocess.Popen(
                [sys.executable, *arguments],
                env=env,
                cwd=REPOSITORY,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    killer = threading.Timer(timeout_s, lambda: [process.kill() for process in processes])
    killer.start()
    try:
        outputs = [process.communicate()[0] for process in processes]
    finally:
        killer.cancel()
    return [Finished(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]
