"""Reports the memory that a forked child finds in its own address space."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Callable
from pathlib import Path


def mapped_ranges() -> list[tuple[int, int]]:
    """The start and the end of each range of addresses that this process may use."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = (re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line) for line in lines)
    return [(int(found[1], 16), int(found[2], 16)) for found in ranges if found is not None]


def is_mapped(address: int) -> bool:
    """Whether this process has memory at ``address``. Reading the address itself would end a process that has none."""
    return any(start <= address < end for start, end in mapped_ranges())


def exit_code_of_child(run: Callable[[], int]) -> int:
    """Run ``run`` in a forked child and return its result, which must be from 0 to 99; negative is a signal."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(run())
        except BaseException:  # noqa: BLE001 (the child must not go on as pytest)
            traceback.print_exc()
            os._exit(100)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)
