"""Send SIGINT to commands of both programs at several moments, and answer with their exit codes and outputs.

The argument is a folder. Each command runs in a forked process of its own, and interrupts itself when it has called so
many functions of Python.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from tests.fork_server import freeze_imported, import_all
from tests.launch import answer

CALLS = (20, 20_000)
"""The numbers of calls and returns before an interrupt; each command makes more."""

TIMEOUT_S = 100

JOB = ("--profile", "h100", "--model", "7B", "--sequence", "2048")


def commands(folder: Path) -> dict[str, list[str]]:
    """Return the arguments of each command by its name, its program and its own."""
    name = str(folder / "nothing")
    planning = {
        "plan": [*JOB, "--world-size", "8", "--micro-batch", "1"],
        "sweep": [*JOB, "--world-sizes", "1,2,4,8", "--micro-batches", "1,2"],
        "cluster": [*JOB, "--gpus", "16", "--global-batch", "64", "--network-gb-per-s", "25"],
    }
    measuring = {
        "profile": ["--quick", "--output", str(folder / "profile.json")],
        "doctor": [],
        "report": [name],
        "delink": [name, name, "--share", "a.0", "--into", "a.1", "--moments", "mean"],
    }
    of_torch = {f"deep_opt_states.cli.main {name}": [name, *rest] for name, rest in {**planning, **measuring}.items()}
    return {**of_torch, **{f"perf_model.__main__ {name}": [name, *rest] for name, rest in planning.items()}}


def interrupted(module: str, arguments: list[str], calls: int) -> None:
    """Run the program ``module`` with ``arguments``, and send SIGINT to it when it has called ``calls`` functions."""
    left = [calls]

    def count(*_: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            sys.setprofile(None)
            os.kill(os.getpid(), signal.SIGINT)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    main_of_program = importlib.import_module(module).main
    sys.setprofile(count)
    sys.exit(main_of_program(arguments))


def main(folder: Path) -> tuple[str, list[str], int] | None:
    """Fork all commands. Return None in the parent, and in each child the module, arguments and calls to run with."""
    import_all()
    freeze_imported()
    children: dict[int, tuple[str, int, Path]] = {}
    for name, arguments in commands(folder).items():
        for calls in CALLS:
            output = folder / f"{name} {calls}"
            pid = os.fork()
            if pid == 0:
                written = os.open(output, os.O_WRONLY | os.O_CREAT)
                os.dup2(written, 1)
                os.dup2(written, 2)
                return name.partition(" ")[0], arguments, calls
            children[pid] = (name, calls, output)
    end_s = time.monotonic() + TIMEOUT_S
    while children:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended:
            name, calls, output = children.pop(ended)
            code = os.waitstatus_to_exitcode(status)
            answer({"command": name, "calls": calls, "code": code, "output": output.read_text()})
        elif time.monotonic() > end_s:
            for pid in children:
                os.kill(pid, signal.SIGABRT)
            end_s = float("inf")
        else:
            time.sleep(0.01)
    return None


if __name__ == "__main__":
    child = main(Path(sys.argv[1]))
    if child is not None:
        interrupted(*child)
