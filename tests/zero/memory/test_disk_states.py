"""Check that states are on disk and not in memory, that nothing is left, and that a failing disk stops all ranks."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import tempfile
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from deep_opt_states.device.state_file import DiskError, StateFile
from deep_opt_states.host import machine
from deep_opt_states.runtime.failure import UpdateFailed
from deep_opt_states.zero.internals.agreement import RanksDisagree
from deep_opt_states.zero.start import disk
from perf_model.prediction.memory import MemoryKind, memory_of
from tests.ranks import ended_ranks, on_ranks, ranks
from tests.tiers import thorough
from tests.zero.parity.cases import ALL_ON_DISK, ON_DISK
from tests.zero.parity.training import (
    Record,
    assert_same_bits,
    closing_engine,
    make_engine,
    recorded,
    shared_folder,
    train_on_batch,
)

CASE = replace(ON_DISK, name="disk", blocks=(ALL_ON_DISK,), schedule=False, clip=0.5)
IN_TWO_FOLDERS = {**ALL_ON_DISK, "nvme_paths": [CASE.disk]}


def train_steps(engine: Any, steps: range) -> Record:
    for number in steps:
        train_on_batch(engine, CASE, number)
    return recorded(engine)


def mapped_bytes(folder: str) -> int:
    found = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, *_, path = line.split(maxsplit=5)
        if path.startswith(folder) and path.endswith("(deleted)"):
            begin, end = (int(address, 16) for address in addresses.split("-"))
            found += end - begin
    return found


@pytest.mark.P5
def test_the_states_on_disk_take_no_host_memory_and_leave_no_file() -> None:
    folder, pattern = Path(tempfile.gettempdir()), "deep_opt_states-*"
    before = set(folder.glob(pattern))
    on_ranks(2, map_states)
    assert set(folder.glob(pattern)) <= before


def map_states() -> None:
    # Eager updates would need memory for second versions, so there are none.
    with closing_engine(CASE, {**ALL_ON_DISK, "eager": True}) as engine:
        plan, setup = engine.optimizer.plan, engine.optimizer._assembly.context.setup
        reserved = engine.optimizer.accounting_device.reserved
        pinned = sum(each.count * each.each_bytes for each in reserved if each.kind is MemoryKind.PINNED)
        planned = memory_of(plan, setup).pinned_bytes
        on_disk = setup.widths.disk_bytes(plan.workload).on_disk
        assert mapped_bytes(CASE.disk) == on_disk > 0.5 * 12 * plan.workload.numel
        assert planned <= pinned <= planned + 100, "and the persistent parameters"
    assert mapped_bytes(CASE.disk) == 0


@pytest.mark.P6
@ranks(2)
def test_without_enough_space_for_all_ranks_nothing_is_written() -> None:
    little = mock.patch.object(shutil, "disk_usage", return_value=SimpleNamespace(free=10**5))
    with little, pytest.raises(DiskError) as refused:
        make_engine(CASE, ALL_ON_DISK)
    error = str(refused.value)
    assert "must have room for the optimizer states of the 2 ranks of this node" in error
    assert "100 kB" in error or "0.0001 GB free" in error
    assert "found 1.07 GB needed" in error, "which the measurement of the disks takes on two ranks"
    assert mapped_bytes(CASE.disk) == 0


@pytest.mark.P4
@pytest.mark.P6
@ranks(2)
def test_a_failing_disk_of_one_rank_stops_all_and_a_checkpoint_restores_bit_identically_to_stock() -> None:
    """Check also a read that fails before a save: it raises on all ranks, and training goes on."""
    with shared_folder() as folder, closing_engine(CASE, None) as engine:
        train_steps(engine, range(3))
        engine.save_checkpoint(str(folder))
        train_steps(engine, range(3, 6))
        # DeepSpeed's kernel computes powers of beta in another way after a load.
        engine.load_checkpoint(str(folder))
        stock = train_steps(engine, range(3, 6))
    fails = dist.get_rank() == 0
    in_update = (
        "The optimizer states must be readable and writable in"
        if fails
        else r"rank 0 cannot continue: DiskError: .* writable in /"
    )
    in_save = (DiskError, "could not be read") if fails else (RanksDisagree, "rank 0: DiskError: .*could not be read")

    def failing(name: str) -> AbstractContextManager[object]:
        return mock.patch.object(os, name, side_effect=OSError(errno.EIO, "EIO")) if fails else nullcontext()

    for name in ("preadv", "pwritev"):
        with shared_folder() as folder, closing_engine(CASE, IN_TWO_FOLDERS) as engine:
            train_steps(engine, range(2))
            if name == "preadv":
                with failing(name), pytest.raises(in_save[0], match=in_save[1]):
                    engine.save_checkpoint(str(folder))
                assert not any(folder.iterdir())
            train_steps(engine, range(2, 3))
            engine.save_checkpoint(str(folder))
            with failing(name), pytest.raises(UpdateFailed, match=in_update):
                train_steps(engine, range(3, 6))
            engine.load_checkpoint(str(folder))
            assert_same_bits(stock, train_steps(engine, range(3, 6)))


@pytest.mark.P5
@ranks(1)
def test_states_that_do_not_fit_into_free_host_memory_are_on_disk_without_another_key() -> None:
    free_bytes = int(disk.HOST_MARGIN * machine.memory().usable_bytes) + 300_000
    free = mock.patch.object(disk, "free_share_bytes", return_value=free_bytes)
    with free, closing_engine(CASE, {"unit_size": 5000}) as engine:
        ours = train_steps(engine, range(3))
        workload = engine.optimizer.plan.workload
    assert 0 < workload.on_disk_numel < workload.numel
    with closing_engine(CASE, None) as engine:
        assert_same_bits(train_steps(engine, range(3)), ours)


def save_and_be_killed(folder: Path) -> None:
    write = StateFile.write

    def write_and_die(*arguments: Any) -> None:
        write(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    with closing_engine(CASE, ALL_ON_DISK) as engine:
        train_steps(engine, range(3))
        engine.save_checkpoint(str(folder))
        train_steps(engine, range(3, 4))
        with mock.patch.object(StateFile, "write", write_and_die):
            train_steps(engine, range(4, 6))


@pytest.mark.P4
def test_a_run_that_is_killed_after_a_write_leaves_nothing_and_resumes_bit_identically_to_stock(tmp_path: Path) -> None:
    before = set(Path(CASE.disk).iterdir())
    [[killed], _] = ended_ranks(1, partial(save_and_be_killed, tmp_path))
    assert killed.returncode == -signal.SIGKILL, killed.output[-5000:]
    assert not [path for path in set(Path(CASE.disk).iterdir()) - before if path.name.startswith("deep_opt_states-")]
    on_ranks(1, resume, tmp_path)


def resume(folder: Path) -> None:
    found = []
    for block in (None, ALL_ON_DISK):
        with closing_engine(CASE, block) as engine:
            engine.load_checkpoint(str(folder))
            found.append(train_steps(engine, range(3, 6)))
    assert_same_bits(*found)


@pytest.mark.parametrize("steps", [60, thorough(1000)])
@ranks(1, timeout_s=900)
def test_training_with_states_on_disk_takes_no_more_memory_with_each_step(steps: int) -> None:
    found = []
    with closing_engine(CASE, ALL_ON_DISK) as engine:
        for last in (steps // 10, steps):
            train_steps(engine, range(last))
            status = Path("/proc/self/status").read_text()
            found.append((int(status.partition("RssAnon:")[2].split()[0]), len(os.listdir("/proc/self/fd"))))
    (early_kb, early_descriptors), (late_kb, late_descriptors) = found
    assert late_descriptors == early_descriptors
    assert late_kb <= early_kb + 2000 + 0.1 * steps
