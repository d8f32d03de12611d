"""Fork the ranks of tests from a process that has imported PyTorch, DeepSpeed and the plugin already.

Importing takes 4 s of CPU time per rank, which is more than many tests train. The server starts no thread, no process
group and no parallel region before it forks, so that each rank finds the libraries as a fresh interpreter does. Two
things differ: modules are imported already, and all ranks of a worker use the same hash of a string.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from typing import Any, TextIO

_MAX_REQUEST_BYTES = 2**20
_POLL_S = 0.02
_STARTED_WITH = frozenset(os.environ)


class ForkServer:
    """A process that forks ranks on request, until this object is closed or the process that made it ends."""

    def __init__(self, environment: dict[str, str], folder: str) -> None:
        # Each request is one message, so that requests of several threads cannot mix.
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.fork_server", str(theirs.fileno())],
                env=environment,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                # Signals from the keyboard are for pytest, which ends the server.
                start_new_session=True,
            )

    def fork(self, module: str, arguments: list[str], environment: dict[str, str]) -> ForkedProcess:
        output, their_output = os.pipe()
        status, their_status = os.pipe()
        message = json.dumps({"module": module, "arguments": arguments, "environment": environment}).encode()
        try:
            socket.send_fds(self._requests, [message], [their_output, their_status])
        finally:
            os.close(their_output)
            os.close(their_status)
        return ForkedProcess(os.fdopen(output, errors="backslashreplace"), os.fdopen(status))

    def close(self) -> None:
        self._requests.close()
        self._process.wait()


class ForkedProcess:
    """A process that a ``ForkServer`` has forked, with the methods of ``subprocess.Popen`` that ``launch`` uses."""

    def __init__(self, output: TextIO, status: TextIO) -> None:
        self._output = output
        self._status = status
        self.pid = self._read_status()
        self.returncode: int | None = None

    def communicate(self) -> tuple[str, None]:
        with self._output, self._status:
            output = self._output.read()
            self.returncode = self._read_status()
        return output, None

    def _read_status(self) -> int:
        line = self._status.readline()
        if not line:
            raise RuntimeError("the fork server has ended")
        return int(line)


def import_all() -> None:
    """Import and load everything that an engine needs, also the parts that DeepSpeed imports when an engine is made."""
    from deepspeed.comm.torch import build_shm_op

    from deep_opt_states.device.kernels.choice import known_arithmetic

    muon = "deepspeed.runtime.zero.muon.muon_optimizer"
    for module in ("torch._dynamo", muon, "deep_opt_states.zero.plugin", "_pytest.assertion"):
        importlib.import_module(module)
    known_arithmetic()
    build_shm_op()


def freeze_imported() -> None:
    """Keep the garbage collection of forked processes from writing to, and thereby copying, all imported objects."""
    gc.collect()
    gc.freeze()


def _become(request: dict[str, Any], output: int) -> None:
    import numpy
    import torch

    os.setsid()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    # Variables that libraries have set when they were imported stay.
    for name in _STARTED_WITH - request["environment"].keys():
        del os.environ[name]
    os.environ.update(request["environment"])
    sys.argv = [request["module"], *request["arguments"]]
    # Ignored by the server if pytest runs in the background of a shell.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # As in fresh interpreters, ranks that do not set a seed draw different numbers.
    numpy.random.seed()
    torch.default_generator.seed()


def _serve(requests: socket.socket) -> str:
    """Fork a process per request. Return its module in that process, and exit when no more requests can come."""
    running: dict[int, int] = {}
    while True:
        ready, *_ = select.select([requests], [], [], _POLL_S if running else None)
        if ready:
            message, descriptors, *_ = socket.recv_fds(requests, _MAX_REQUEST_BYTES, 2)
            if not message:
                sys.exit()
            output, status = descriptors
            pid = os.fork()
            if pid == 0:
                for descriptor in (*running.values(), status):
                    os.close(descriptor)
                request = json.loads(message)
                _become(request, output)
                return str(request["module"])
            os.close(output)
            running[pid] = status
            _report(status, pid)
        for pid in list(running):
            ended, code = os.waitpid(pid, os.WNOHANG)
            if ended:
                status = running.pop(pid)
                _report(status, os.waitstatus_to_exitcode(code))
                os.close(status)


def _report(status: int, number: int) -> None:
    # The test that waited for it may have ended.
    with suppress(BrokenPipeError):
        os.write(status, f"{number}\n".encode())


def main() -> None:
    import_all()
    freeze_imported()
    module = _serve(socket.socket(fileno=int(sys.argv[1])))
    # Kept until the process ends, as a fresh interpreter keeps the objects of ``__main__`` for its exit callbacks.
    sys.modules["__main__"].namespace = runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
