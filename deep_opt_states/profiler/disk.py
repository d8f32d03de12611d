"""Measure how fast disks read and write states, with the sizes and the I/O of training."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from deep_opt_states.device.state_file import StateFile, file_system
from deep_opt_states.profiler.ranks import Ranks, call_on_all_ranks
from perf_model.prediction.cost import DiskRates
from perf_model.prediction.hardware import DISK_QUANTITIES, Measurement

BLOCK_BYTES = 32 * 2**20
NUM_BLOCKS = 8
"""The size of one state of a unit on disk, about, and the blocks that are read and written for a measurement."""

MEASURED_BYTES = 2 * NUM_BLOCKS * BLOCK_BYTES
"""The space in each folder that a measurement takes on one rank."""

REPETITIONS = 5


def measure_quantities(ranks: Ranks, folders: Sequence[Path]) -> dict[str, Measurement]:
    """Return ``DISK_QUANTITIES`` of ``folders``, while all ranks use them; the slowest rank counts.

    This is a collective. Raise ``ProbeError`` on every rank if a disk fails on one.
    """
    samples = []
    for _ in range(REPETITIONS):
        of_ranks = ranks.gather(call_on_all_ranks(ranks, lambda: measure_disks(folders)))
        samples.append([min(rates) for rates in zip(*of_ranks, strict=True)])
    by_quantity = zip(DISK_QUANTITIES, zip(*samples, strict=True), strict=True)
    return {name: Measurement(samples=of_one) for name, of_one in by_quantity}


def doubts(folders: Sequence[Path]) -> list[str]:
    """Return in which of ``folders`` memory, and not a disk, may answer. Raise ``DiskError``."""
    found = []
    for folder in folders:
        file, kind = StateFile(folder, mmap.PAGESIZE), file_system(folder)
        file.reserve(0, mmap.PAGESIZE)
        file.check_coherence(0)
        if kind in ("tmpfs", "ramfs", "overlay"):
            found.append(f"{folder} is on {kind}: memory or a container's layer may answer instead of a disk")
        elif not file.is_direct:
            found.append(f"{folder} has no direct I/O (O_DIRECT) that agrees with the page cache, which is used")
        elif file.caches_reads():
            found.append(
                f"the page cache may answer instead of the disk in {folder}: {kind} accepts O_DIRECT, and caches"
            )
    return found


def measure_disks(folders: Sequence[Path]) -> DiskRates:
    """Return the bytes per second of all ``folders`` together. Raise ``DiskError``."""
    reads, writes = [], []
    for folder in folders:
        file = StateFile(folder, MEASURED_BYTES)
        file.reserve(0, MEASURED_BYTES)
        source, target = (memoryview(mmap.mmap(-1, BLOCK_BYTES)) for _ in range(2))
        # A file system that compresses would store nothing of zeros.
        source[:] = os.urandom(BLOCK_BYTES)
        # The blocks that are read precede those that are written.
        _transfer(file.write, source, 0)
        reads.append(partial(_transfer, file.read, target, 0))
        writes.append(partial(_transfer, file.write, source, NUM_BLOCKS))
    # Once before: the first write to reserved space is slower on some file systems.
    _seconds(writes)
    written_s, read_s, both_s = _seconds(writes), _seconds(reads), _seconds([*writes, *reads])
    total = len(folders) * NUM_BLOCKS * BLOCK_BYTES
    return DiskRates(total / read_s, total / written_s, 2 * total / both_s)


def _transfer(transfer: Callable[[memoryview, int], None], memory: memoryview, first: int) -> None:
    for block in range(first, first + NUM_BLOCKS):
        transfer(memory, block * BLOCK_BYTES)


def _seconds(tasks: Sequence[Callable[[], None]]) -> float:
    start_s = time.perf_counter()
    with ThreadPoolExecutor(len(tasks)) as threads:
        for running in [threads.submit(task) for task in tasks]:
            running.result()
    return time.perf_counter() - start_s
