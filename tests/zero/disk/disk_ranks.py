"""Train with states on disk, and report their bytes, and how training ends and goes on when a disk fails.

Arguments: ``mapped``, for the memory and the files of an engine, ``failing``, for a failure of rank 0's disk, ``full``,
for a start without enough space, ``fills``, for a host with little free memory, ``killed FOLDER`` and then ``resumed
FOLDER``, or ``steps NUMBER``, for the growth of memory and descriptors.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from deep_opt_states.device.state_file import DiskError, StateFile
from deep_opt_states.host import machine
from deep_opt_states.runtime.failure import UpdateFailed
from deep_opt_states.zero.start import disk
from perf_model.prediction.memory import MemoryKind, memory_of
from tests.launch import answer
from tests.zero.parity.cases import ALL_ON_DISK, ON_DISK
from tests.zero.parity.parity_model import batch
from tests.zero.parity.training import Record, closing_engine, collect, differences, make_engine, shared_folder
from tests.zero.process_group import process_group

CASE = replace(ON_DISK, name="disk", blocks=(ALL_ON_DISK,), schedule=False, clip=0.5)


IN_TWO_FOLDERS = {**ALL_ON_DISK, "nvme_paths": [CASE.disk]}


def train_steps(engine: Any, steps: range) -> Record:
    """Train the steps, and return the states after them."""
    for number in steps:
        x, target = batch(CASE, dist.get_rank(), number, torch.bfloat16)
        engine.backward(engine(x, target, 1.0, 1.0))
        engine.step()
    record = Record()
    collect(engine.optimizer, record)
    return record


def mapped_bytes(folder: str) -> int:
    """Return the bytes that this process has mapped from files without a name in ``folder``."""
    found = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, *_, path = line.split(maxsplit=5)
        if path.startswith(folder) and path.endswith("(deleted)"):
            begin, end = (int(address, 16) for address in addresses.split("-"))
            found += end - begin
    return found


def mapped() -> Iterator[dict[str, Any]]:
    """Yield the bytes of an engine on disk and in memory, found and planned."""
    with closing_engine(CASE, ALL_ON_DISK) as engine:
        assembly = engine.optimizer._assembly
        plan, setup = engine.optimizer.plan, assembly.context.setup
        reserved = engine.optimizer.accounting_device.reserved
        yield {
            "mapped": mapped_bytes(CASE.disk),
            "on disk": setup.widths.disk_bytes(plan.workload).on_disk,
            "pinned": sum(each.count * each.each_bytes for each in reserved if each.kind is MemoryKind.PINNED),
            "planned": memory_of(plan, setup).pinned_bytes,
            "numel": plan.workload.numel,
        }
    yield {"mapped": mapped_bytes(CASE.disk)}


def full() -> Iterator[dict[str, Any]]:
    """Yield the error of a start without enough space, and the bytes that are mapped afterwards."""
    with mock.patch.object(shutil, "disk_usage", return_value=SimpleNamespace(free=10**5)):
        try:
            make_engine(CASE, ALL_ON_DISK)
        except DiskError as error:
            yield {"error": str(error), "mapped": mapped_bytes(CASE.disk)}


def failing() -> Iterator[dict[str, Any]]:
    """Yield how each rank's training ends with a failure of rank 0's disk, and how it goes on from a checkpoint."""
    with shared_folder() as folder, closing_engine(CASE, None) as engine:
        train_steps(engine, range(3))
        engine.save_checkpoint(str(folder))
        train_steps(engine, range(3, 6))
        # DeepSpeed's kernel computes powers of beta in another way after a load.
        engine.load_checkpoint(str(folder))
        expected = train_steps(engine, range(3, 6))
    for name in ("preadv", "pwritev"):
        with shared_folder() as folder, closing_engine(CASE, IN_TWO_FOLDERS) as engine:
            train_steps(engine, range(3))
            engine.save_checkpoint(str(folder))
            error = OSError(errno.EIO, "EIO")
            failure = mock.patch.object(os, name, side_effect=error if dist.get_rank() == 0 else None)
            ended = ""
            try:
                if dist.get_rank() == 0:
                    failure.start()
                train_steps(engine, range(3, 6))
            except UpdateFailed as failed:
                ended = str(failed)
            finally:
                mock.patch.stopall()
            engine.load_checkpoint(str(folder))
            found = train_steps(engine, range(3, 6))
        yield {"ended": ended, "differences": differences(expected, found)}


def fills() -> Iterator[dict[str, Any]]:
    """Yield the parameters on disk and all, if the host has little memory above the margin and the block no key."""
    free_bytes = int(disk.HOST_MARGIN * machine.memory().usable_bytes) + 300_000
    free = mock.patch.object(disk, "free_share_bytes", return_value=free_bytes)
    with free, closing_engine(CASE, {"unit_size": 5000}) as engine:
        found = train_steps(engine, range(3))
        workload = engine.optimizer.plan.workload
    with closing_engine(CASE, None) as engine:
        expected = train_steps(engine, range(3))
    yield {"on disk": workload.on_disk_numel, "all": workload.numel, "differences": differences(expected, found)}


def killed(folder: str) -> Iterator[dict[str, Any]]:
    """Save a checkpoint, and kill this process after a write of a later update."""
    write = StateFile.write

    def write_and_die(*arguments: Any) -> None:
        write(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    with closing_engine(CASE, ALL_ON_DISK) as engine:
        train_steps(engine, range(3))
        engine.save_checkpoint(folder)
        train_steps(engine, range(3, 4))
        with mock.patch.object(StateFile, "write", write_and_die):
            train_steps(engine, range(4, 6))
    yield {"killed": False}


def resumed(folder: str) -> Iterator[dict[str, Any]]:
    """Yield the differences between stock and the plugin, both resumed from the checkpoint in ``folder``."""
    found = []
    for block in (None, ALL_ON_DISK):
        with closing_engine(CASE, block) as engine:
            engine.load_checkpoint(folder)
            found.append(train_steps(engine, range(3, 6)))
    yield {"differences": differences(*found)}


def steps(number: str) -> Iterator[dict[str, Any]]:
    """Yield the resident memory and the open descriptors after a tenth of the steps, and after all."""
    with closing_engine(CASE, ALL_ON_DISK) as engine:
        for last in (int(number) // 10, int(number)):
            train_steps(engine, range(last))
            status = Path("/proc/self/status").read_text()
            rss_kb = int(status.partition("RssAnon:")[2].split()[0])
            yield {"anonymous kB": rss_kb, "descriptors": len(os.listdir("/proc/self/fd"))}


if __name__ == "__main__":
    mode, *arguments = sys.argv[1:]
    with process_group():
        modes = (mapped, failing, full, fills, killed, resumed, steps)
        for found in {function.__name__: function for function in modes}[mode](*arguments):
            answer(found)
