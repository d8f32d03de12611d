"""Run a function in a forked child, and inspect which addresses a process has mapped."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Callable
from pathlib import Path


def mapped_ranges() -> list[tuple[int, int]]:
    """Return the start and the end of each mapped range of addresses of this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = (re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line) for line in lines)
    return [(int(match[1], 16), int(match[2], 16)) for match in ranges if match is not None]


def is_mapped(address: int) -> bool:
    """Return whether this process has mapped ``address``.

    A read from an address that is not mapped would end the process.
    """
    return any(start <= address < end for start, end in mapped_ranges())


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
