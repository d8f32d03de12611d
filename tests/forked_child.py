"""Run a function in a forked child or at an alarm, and inspect which addresses a process has mapped."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def protection_of(address: int, process: int | str = "self") -> str:
    """Return the permissions of ``address`` in the process, such as ``rw-p``, or "" if it is not mapped there."""
    for line in Path(f"/proc/{process}/maps").read_text().splitlines():
        addresses, protection, *_ = line.split()
        begin, end = (int(border, 16) for border in addresses.split("-"))
        if begin <= address < end:
            return protection
    return ""


def is_mapped(address: int, process: int | str = "self") -> bool:
    return protection_of(address, process) != ""


def affinities() -> dict[int, frozenset[int]]:
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):
            found[int(task.name)] = frozenset(os.sched_getaffinity(int(task.name)))
    return found


def exit_code_of_child(run: Callable[[], int]) -> int:
    """Run ``run`` in a forked child, and return the exit code: the result, which must be from 0 to 99.

    The exit code is 100 if ``run`` raises, and the negative number of the signal that has ended the child.
    """
    child = os.fork()
    if child == 0:
        try:
            os._exit(run())
        except BaseException:  # noqa: BLE001 (the child must not continue as pytest)
            traceback.print_exc()
            os._exit(100)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


@contextmanager
def alarm_after(seconds: float, handler: Callable[..., object]) -> Iterator[None]:
    previous = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        try:
            # The alarm may come at this moment.
            signal.setitimer(signal.ITIMER_REAL, 0)
        finally:
            signal.signal(signal.SIGALRM, previous)
