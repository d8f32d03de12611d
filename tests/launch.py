"""Start a Python program as N ranks on this machine, and wait for them."""

from __future__ import annotations

import atexit
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
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from tests.fork_server import ForkedProcess, ForkServer

REPOSITORY = Path(__file__).resolve().parent.parent
_ANSWER = "ANSWER "
_SET_PER_RANK = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT"}
_NOT_READ_BY_IMPORTS = _SET_PER_RANK | {
    "XDG_CACHE_HOME",
    "PYTEST_CURRENT_TEST",
    # DeepSpeed and PyTorch set these themselves when they are imported, also in this process.
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "TORCHINDUCTOR_CACHE_DIR",
}
"""Variables that may differ between a forked rank and the fork server: no module that is imported reads them."""

Process = subprocess.Popen[str] | ForkedProcess


@dataclass
class Finished:
    returncode: int
    output: str

    def answers(self) -> list[Any]:
        lines = [line for line in self.output.splitlines() if line.startswith(_ANSWER)]
        return [json.loads(line.removeprefix(_ANSWER)) for line in lines]


def answer(value: Any) -> None:
    """Write ``value``, which must be JSON, for ``Finished.answers``; called in a program that ``run_ranks`` started."""
    # One write: print() makes two where nothing is buffered, and another rank's may come between.
    sys.stdout.write(_ANSWER + json.dumps(value) + "\n")
    sys.stdout.flush()


def environment(**changes: str) -> dict[str, str]:
    ours = {
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
        # Added to the existing value, which may lead to DeepSpeed.
        "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])),
        # One quick hardware profile serves all tests.
        "XDG_CACHE_HOME": str(REPOSITORY / ".cache"),
    }
    return {**os.environ, **ours, **changes}


_STARTING = threading.Lock()
_ENVIRONMENT = environment()
"""The environment of the fork server: read before a test can change this process's."""


def free_port() -> int:
    """Return a port of this worker of pytest-xdist that no other process takes before a rank listens there."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    share = range(10_000 + worker, 32_768, workers)
    # At random: another run of the tests has the same workers. A sample of all ports would take long.
    for port in random.SystemRandom().sample(share, 200):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError(f"200 of the {len(share)} ports of worker {worker} are taken")


def run_ranks(
    world_size: int, arguments: list[str], timeout_s: float, *, fresh: bool = False, **changes: str
) -> list[Finished]:
    """Run a program as one process per rank, with the environment that a launcher sets, and wait for all ranks.

    ``["-m", module, ...]`` is forked from the fork server, unless it is ``fresh``, or ``changes``, or the test, set a
    variable that is read when modules are imported. A rank that outlives the timeout is killed.
    """
    port, size = free_port(), str(world_size)
    shared = {"WORLD_SIZE": size, "LOCAL_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **changes}
    environments = [environment(RANK=str(rank), LOCAL_RANK=str(rank), **shared) for rank in range(world_size)]
    if fresh or arguments[0] != "-m" or not all(map(_imports_like_fork_server, environments)):
        return run_together([[sys.executable, *arguments]] * world_size, port, timeout_s, environments)
    _, module, *others = arguments
    with _STARTING:
        server = _fork_server()
    return _wait_for([server.fork(module, others, variables) for variables in environments], port, timeout_s)


def run_together(
    commands: list[list[str]], port: int, timeout_s: float, environments: list[dict[str, str]]
) -> list[Finished]:
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
    return _wait_for(processes, port, timeout_s)


@cache
def _fork_server() -> ForkServer:
    server = ForkServer(_ENVIRONMENT, str(REPOSITORY))
    atexit.register(server.close)
    return server


def _imports_like_fork_server(variables: dict[str, str]) -> bool:
    """Return whether a process with the environment ``variables`` imports the same as the fork server has imported."""
    names = (variables.keys() | _ENVIRONMENT.keys()) - _NOT_READ_BY_IMPORTS
    return all(variables.get(name) == _ENVIRONMENT.get(name) for name in names)


def _wait_for(processes: list[Process], port: int, timeout_s: float) -> list[Finished]:
    killer = threading.Timer(timeout_s, lambda: [kill_with_descendants(process) for process in processes])
    killer.start()
    try:
        outputs = [process.communicate()[0] for process in processes]
    except BaseException:
        # An interrupt from the keyboard does not reach the sessions of the processes.
        killer.function()
        raise
    finally:
        killer.cancel()
        remove_shared_memory(port)
    return [Finished(int(process.returncode or 0), output) for process, output in zip(processes, outputs, strict=True)]


def kill_with_descendants(process: Process) -> None:
    """Kill the process, which leads a session, with this session and its descendants in other sessions."""
    with suppress(psutil.NoSuchProcess):
        for descendant in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                descendant.kill()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def remove_shared_memory(port: int) -> None:
    """Remove the 66 MB per rank that DeepSpeed leaves in shared memory when a process ends."""
    for path in shared_buffers(f"*_{port}_*"):
        path.unlink(missing_ok=True)


def shared_buffers(pattern: str = "*") -> set[Path]:
    return set(Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_{pattern}"))


def open_shared_buffers() -> set[Path]:
    """Return the buffers that a running rank has open: other ranks may still wait for them without limit."""
    files = (file for process in psutil.process_iter(["open_files"]) for file in process.info["open_files"] or ())
    return {Path(file.path) for file in files} & shared_buffers()
