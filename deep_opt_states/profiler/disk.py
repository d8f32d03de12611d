"""Measure how fast disks read and write states, with the sizes and the I/O of training."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from deep_opt_states.device.state_file import StateFile
from perf_model.prediction.cost import DiskRates

BLOCK_BYTES = 32 * 2**20
NUM_BLOCKS = 8
"""The size of one state of a unit on disk, about, and the blocks that are read and written for a measurement."""


def measure_disks(folders: Sequence[Path]) -> DiskRates:
    """Return the bytes per second of all ``folders`` together. Raise ``DiskError``."""
    each = [_measure(folder) for folder in folders]
    return DiskRates(*(sum(rates) for rates in zip(*each, strict=True)))


def _measure(folder: Path) -> DiskRates:
    file = StateFile(folder, 2 * NUM_BLOCKS * BLOCK_BYTES)
    file.reserve(0, 2 * NUM_BLOCKS * BLOCK_BYTES)
    source, target = (memoryview(mmap.mmap(-1, BLOCK_BYTES)) for _ in range(2))

    def write(first: int) -> None:
        for block in range(NUM_BLOCKS):
            file.write(source, (first + block) * BLOCK_BYTES)

    def read() -> None:
        for block in range(NUM_BLOCKS):
            file.read(target, block * BLOCK_BYTES)

    # Once before: the first write to reserved space is slower on some file systems.
    write(0)
    write(NUM_BLOCKS)
    written_s, read_s = _seconds(lambda: write(0)), _seconds(read)
    both_s = _seconds(lambda: write(NUM_BLOCKS), read)
    file.close()
    total = NUM_BLOCKS * BLOCK_BYTES
    return DiskRates(total / read_s, total / written_s, 2 * total / both_s)


def _seconds(*tasks: Callable[[], None]) -> float:
    threads = [threading.Thread(target=task) for task in tasks]
    start_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start_s
