"""Describe the process that ``test_launch.py`` has started, or end it in the way that the arguments name."""

from __future__ import annotations

import atexit
import os
import random
import signal
import subprocess
import sys
import threading
import time

from tests.fork_server import import_all
from tests.launch import answer

FORKED = "torch" in sys.modules
"""Whether this process was forked from one that had imported PyTorch."""


def describe() -> None:
    """Report everything that a rank may depend on."""
    import_all()
    import torch

    main = sys.modules["__main__"]
    answer(
        {
            "forked": FORKED,
            "arguments": sys.argv,
            "environment": {name: os.environ[name] for name in os.environ},
            "folder": os.getcwd(),
            "module": [__name__, main.__spec__ and main.__spec__.name, main.__file__, vars(main) is globals()],
            "leads a session": os.getsid(0) == os.getpid(),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": [len(threading.enumerate()), len(os.listdir("/proc/self/task"))],
            "torch threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
            "signals": {name: str(signal.getsignal(name)) for name in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)},
            "is a terminal": [sys.stdin.isatty(), sys.stdout.isatty(), sys.stderr.isatty()],
            "affinity": sorted(os.sched_getaffinity(0)),
            "defaults": [str(torch.get_default_dtype()), torch.is_grad_enabled(), torch.distributed.is_initialized()],
        }
    )


def draw() -> None:
    """Report the first random number of each library."""
    import numpy
    import torch

    answer({"random": random.random(), "numpy": numpy.random.random(), "torch": torch.rand(()).item()})


def hang() -> None:
    """Start two children, one of them in another session, report their process ids, and wait for ever."""
    command = [sys.executable, "-c", "import time; time.sleep(1000)"]
    answer([subprocess.Popen(command, start_new_session=other_session).pid for other_session in (False, True)])
    time.sleep(1000)


def end(way: str, code: int) -> None:
    """End this process in the given way, after it has written to both streams."""
    atexit.register(print, "exit callback")
    print("written to stdout", flush=True)
    print("written to stderr", file=sys.stderr, flush=True)
    if way == "exit":
        sys.exit(code)
    if way == "_exit":
        os._exit(code)
    if way == "raise":
        raise ValueError("raised on purpose")
    if way == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    way, *others = sys.argv[1:]
    if way == "forked":
        answer(FORKED)
    elif way in ("describe", "draw", "hang"):
        {"describe": describe, "draw": draw, "hang": hang}[way]()
    else:
        end(way, int(others[0]) if others else 0)
