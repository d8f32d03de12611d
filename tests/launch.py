"""Starts a Python program as N ranks on this machine and waits for them."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
_ANSWER = "ANSWER "


@dataclass
class Finished:
    returncode: int
    output: str

    def answers(self) -> list[Any]:
        """What the program said with ``answer``, in order, among all that it and its libraries print."""
        lines = [line for line in self.output.splitlines() if line.startswith(_ANSWER)]
        return [json.loads(line.removeprefix(_ANSWER)) for line in lines]


def answer(value: Any) -> None:
    """Called in a program that ``run_ranks`` started."""
    # One write: print() makes two where nothing is buffered, and another rank's may come between.
    sys.stdout.write(_ANSWER + json.dumps(value) + "\n")
    sys.stdout.flush()


def environment(**changes: str) -> dict[str, str]:
    """This process's environment, with the CPU accelerator, one thread a rank, and tracebacks of crashes."""
    ours = {
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
        # With what is there already: where DeepSpeed may be.
        "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])),
        # One quick hardware profile serves all tests.
        "XDG_CACHE_HOME": str(REPOSITORY / ".cache"),
    }
    return {**os.environ, **ours, **changes}


def free_port() -> int:
    """Of this worker's of pytest-xdist alone, and none that Linux gives to whoever asks for any: nobody takes it before
    the rank that listens there, some seconds from now."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    share = range(10_000 + worker, 32_768, workers)
    # At random: another run of the tests has the same workers.
    for port in random.SystemRandom().sample(share, len(share)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError(f"all of the {len(share)} ports of worker {worker} are taken")


def run_ranks(world_size: int, arguments: list[str], timeout_s: float, **changes: str) -> list[Finished]:
    """One process a rank, with the environment that a launcher sets.

    A rank that outlives the timeout, counted from the start of all, is killed; its return code is negative then.
    """
    port = free_port()
    shared = {
        "WORLD_SIZE": str(world_size),
        "LOCAL_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        **changes,
    }
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank), **shared} for rank in range(world_size)]
    commands = [[sys.executable, *arguments]] * world_size
    return run_together(commands, port, timeout_s, [environment(**its) for its in ranks])


def run_together(
    commands: list[list[str]], port: int, timeout_s: float, environments: list[dict[str, str]]
) -> list[Finished]:
    """At the same time, from this repository; those that they start meet at ``port``.

    A process that outlives the timeout, counted from the start of all, is killed; its return code is negative then.
    """
    processes = [
        subprocess.Popen(
            command,
            env=env,
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for command, env in zip(commands, environments, strict=True)
    ]
    # With what they have started: a launcher that is killed leaves its ranks behind.
    killer = threading.Timer(timeout_s, lambda: [kill_session(process) for process in processes])
    killer.start()
    try:
        outputs = [process.communicate()[0] for process in processes]
    finally:
        killer.cancel()
        remove_shared_memory(port)
    return [Finished(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


def kill_session(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def remove_shared_memory(port: int) -> None:
    """DeepSpeed leaves 66 MB a rank in shared memory when a process ends (``csrc/cpu/comm/shm.cpp``)."""
    for path in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
        path.unlink()
