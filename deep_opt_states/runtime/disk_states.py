"""Keep the states of units on disk: pages of the slab that are mapped from a file, and slots in which they are updated.

The sub-groups' tensors stay whole, so that checkpoints and scripts read and write them through the mapping, by way of
the page cache. An update uses direct I/O between file and slot instead. A unit's first and last bytes may share a page
with other units: they stay in host memory, and are copied to the slot and back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from functools import partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from deep_opt_states.device.interface import Device
from deep_opt_states.device.kernels.adam import UpdatedStates
from deep_opt_states.device.slab import HostSlab
from deep_opt_states.device.state_file import StateFile
from deep_opt_states.runtime.worker import Worker
from perf_model.schedule.host_layout import PAGE_BYTES, DiskRun, Widths, runs_on_disk
from perf_model.schedule.workload import Workload


class StatesInSlot:
    """The states of one unit, ``runs``, in one disk slot: ``parts``, one entry per range."""

    def __init__(self, runs: Sequence[DiskRun], disk: DiskStates, slot: HostSlab) -> None:
        self._pages: dict[StateFile, list[tuple[memoryview, int]]] = {file: [] for file in disk.files}
        """Memory of the slot and the offset of its contents in the file, by file."""
        self._disk = disk
        self._edges: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Bytes that are not in the file: their places in the slot and in the slab."""
        tensors: dict[int, dict[str, torch.Tensor]] = {}
        slot_bytes = 0
        for run in runs:
            # The slot holds whole pages, even if only a part belongs to the unit.
            to_slot = slot_bytes - run.begin_bytes // PAGE_BYTES * PAGE_BYTES
            dtype = disk.dtypes[run.name]
            numel = (run.end_bytes - run.begin_bytes) // dtype.itemsize
            tensors.setdefault(run.part, {})[run.name] = slot.tensor(run.begin_bytes + to_slot, numel, dtype)
            for file, offset_bytes, size_bytes in stripes(run, disk.files):
                self._pages[file].append((slot.bytes(offset_bytes + to_slot, size_bytes), offset_bytes))
            for begin, end in run.edges:
                in_slab = disk.slab.tensor(begin, end - begin, torch.uint8)
                self._edges.append((slot.tensor(begin + to_slot, end - begin, torch.uint8), in_slab))
            slot_bytes += run.slot_bytes
        self.parts = [UpdatedStates(**tensors[part]) for part in sorted(tensors)]

    def read(self) -> None:
        """Read the states to the slot. Raise ``DiskError``."""
        for in_slot, in_slab in self._edges:
            in_slot.copy_(in_slab)
        self._transfer(StateFile.read, self._disk.readers)

    def write(self) -> None:
        """Write the states in the slot to the disk. Raise ``DiskError``."""
        for in_slot, in_slab in self._edges:
            in_slab.copy_(in_slot)
        self._transfer(StateFile.write, self._disk.writers)

    def _transfer(self, transfer: Callable[[StateFile, memoryview, int], None], threads: Sequence[Worker]) -> None:
        """Transfer the pages of all files at the same time."""

        def of_one_file(file: StateFile) -> None:
            for memory, offset_bytes in self._pages[file]:
                transfer(file, memory, offset_bytes)

        running = [thread.submit(partial(of_one_file, file)) for thread, file in zip(threads, self._pages, strict=True)]
        # Also after a failure nothing may be in flight when this returns.
        wait(running)
        for future in running:
            future.result()


class DiskStates:
    """All units on disk of one rank. ``units`` holds them by their ranges and disk slot.

    ``slab`` gets its pages on disk from files, one in each of ``folders``, which share each state of each unit equally.
    Raise ``DiskError`` if a disk is full, and ``HostMemoryError`` if the host has no memory for the slots.
    """

    def __init__(
        self,
        workload: Workload,
        widths: Widths,
        dtypes: Mapping[str, torch.dtype],
        slab: HostSlab,
        device: Device[Any],
        folders: Sequence[Path],
    ) -> None:
        self.dtypes, self.slab = dtypes, slab
        self.files = [StateFile(folder, slab.size_bytes) for folder in folders]
        self.readers, self.writers = ([Worker(name="deep_opt_states-disk") for _ in folders] for _ in range(2))
        # At exit, the lanes wait for these threads.
        for thread in (*self.readers, *self.writers):
            thread.close.atexit = False
        by_number = groupby(runs_on_disk(workload, widths), attrgetter("unit"))
        by_unit = {workload.units[unit].ranges: list(runs) for unit, runs in by_number}
        self._placed = [stripe for runs in by_unit.values() for run in runs for stripe in stripes(run, self.files)]
        # All space is taken before anything is written.
        for file, offset_bytes, size_bytes in self._placed:
            file.reserve(offset_bytes, size_bytes)
        for file, offset_bytes, size_bytes in self._placed:
            file.check_coherence(offset_bytes)
            slab.map_file(file.fd, offset_bytes, size_bytes)
        _, each_bytes, count = widths.disk_bytes(workload)
        self.slots = [device.host_slab(each_bytes) for _ in range(count)]
        in_slots = [[StatesInSlot(runs, self, slot) for slot in self.slots] for runs in by_unit.values()]
        self.units = dict(zip(by_unit, in_slots, strict=True))

    def check_readable(self) -> None:
        """Read all pages; raise ``DiskError``. If a reader of the mapping found the failure, SIGBUS would end it."""
        for file, offset_bytes, size_bytes in self._placed:
            file.check_readable(offset_bytes, size_bytes)

    def close(self) -> None:
        """Close the files, whose space is free when no tensor over their pages is left."""
        self.units.clear()
        for thread in (*self.readers, *self.writers):
            thread.close()
        for file in self.files:
            file.close()
        for slot in self.slots:
            slot.close()


def stripes(run: DiskRun, files: Sequence[StateFile]) -> Iterator[tuple[StateFile, int, int]]:
    """Yield the pages of ``run`` by file: the file, the offset and the size in bytes."""
    pages = run.size_bytes // PAGE_BYTES
    for number, file in enumerate(files):
        first, end = (PAGE_BYTES * (pages * each // len(files)) for each in (number, number + 1))
        if first < end:
            yield file, run.offset_bytes + first, end - first
