"""Check updates of units on disk: their bits in hostile timing, each wait, failures of a disk, and what is left."""

from __future__ import annotations

import errno
import gc
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from deep_opt_states.device.cpu import HostDevice
from deep_opt_states.device.state_file import DiskError, StateFile
from deep_opt_states.runtime.issuer import Issuer
from perf_model.schedule.action import Action, ActionKind
from perf_model.schedule.cutting import cut_into_units
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Partition
from tests.runtime.moving import Model, MovingIteration, MovingTraining, iterations_of, train_serially
from tests.runtime.random_states import same

PARTITIONS = [
    Partition("layers.0.weight", 9000),
    Partition("layers.0.norm", 100, is_persistent=True),
    Partition("layers.1.weight", 9001, is_on_disk=True),
    Partition("layers.1.norm", 100, is_persistent=True),
    Partition("layers.2.weight", 20000, is_on_disk=True),
    Partition("layers.3.weight", 2900),
]
SECOND = [Partition("head.weight", 7000, is_on_disk=True), Partition("head.bias", 10)]
SUB_GROUPS = [PARTITIONS, SECOND]
MODEL = Model(numels=tuple(sum(each.numel for each in group) for group in SUB_GROUPS), persistent=[[], []])


def random_plan(chance: random.Random) -> UpdatePlan:
    workload = cut_into_units(SUB_GROUPS, chance.choice((2500, 5000, 10**6)), disk_unit_size=3000)
    placements = tuple(unit.fixed or chance.choice(list(Placement)) for unit in workload.units)
    return UpdatePlan(workload=workload, placements=placements, num_slots=2)


def iterations(chance: random.Random, count: int) -> list[MovingIteration]:
    return iterations_of(chance, [random_plan(chance) for _ in range(2)], count)


@contextmanager
def hostile_disk(chance: random.Random, longest_s: float = 0.004) -> Iterator[None]:
    def late(transfer: Callable[..., None]) -> Callable[..., None]:
        def run(file: StateFile, memory: memoryview, offset_bytes: int) -> None:
            time.sleep(chance.choice((0, longest_s)) * chance.random())
            transfer(file, memory, offset_bytes)
            time.sleep(chance.choice((0, longest_s)) * chance.random())

        return run

    with mock.patch.multiple(StateFile, read=late(StateFile.read), write=late(StateFile.write)):
        yield


def is_right(folder: Path, seed: int) -> bool:
    chance = random.Random(seed)
    planned = iterations(chance, 5)
    with hostile_disk(chance):
        found = MovingTraining(MODEL, planned[0].plan, HostDevice(), [folder] * (1 + seed % 2)).train(planned)
    return same(found, train_serially(MODEL, planned))


@pytest.mark.P2
@pytest.mark.parametrize("seed", range(4))
def test_units_on_disk_have_the_bits_of_serial_updates(tmp_path: Path, seed: int) -> None:
    assert is_right(tmp_path, seed)


def without_waits_of(kind: ActionKind) -> AbstractContextManager[Any]:
    submit = Issuer._submit

    def submit_at_once(issuer: Issuer, action: Action, events: Any, writes_before: Any) -> Any:
        if action.kind is kind:
            action, writes_before = replace(action, waits=()), ()
        return submit(issuer, action, events, writes_before)

    return mock.patch.object(Issuer, "_submit", submit_at_once)


WAITS = {
    "update after read": lambda: without_waits_of(ActionKind.CPU_STEP),
    "write after update": lambda: without_waits_of(ActionKind.WRITE),
    "read after writes": lambda: without_waits_of(ActionKind.READ),
    "readers after writes": lambda: mock.patch.object(Issuer, "finish_writes"),
}


@pytest.mark.P2
@pytest.mark.parametrize("wait", WAITS)
def test_without_one_of_its_waits_a_number_is_wrong(tmp_path: Path, wait: str) -> None:
    with WAITS[wait]():
        assert not all(is_right(tmp_path, seed) for seed in range(12))


def failing(name: str, before: int, error: OSError | None) -> Callable[..., int]:
    """Return the transfer of ``os`` with this name, which fails after ``before`` transfers; it moves no byte then."""
    transfer, left = getattr(os, name), [before]

    def transfer_or_fail(*args: Any) -> int:
        left[0] -= 1
        if left[0] < 0 and error is not None:
            raise error
        return transfer(*args) if left[0] >= 0 else 0

    return transfer_or_fail


@pytest.mark.P6
@pytest.mark.parametrize("error", [OSError(errno.EIO, "EIO"), None], ids=str)
@pytest.mark.parametrize("name", ["preadv", "pwritev"])
@pytest.mark.parametrize(("before", "ends_on_host"), [(0, True), (7, False), (40, True), (100, False)])
def test_a_failed_transfer_is_a_failure_of_the_update_that_names_the_folder(
    tmp_path: Path, name: str, error: OSError | None, before: int, ends_on_host: bool
) -> None:
    plan = random_plan(random.Random(1))
    training = MovingTraining(MODEL, plan, HostDevice(), [tmp_path])
    iteration = MovingIteration(plan=plan, prefetches=True, overlaps_flushes=not ends_on_host)
    with mock.patch.object(os, name, failing(name, before, error)):
        for number in range(10):
            # The harness asserts after each update that there is no failure.
            with suppress(AssertionError):
                list(training.run(number, iteration))
            if training.executor.failure is not None:
                break
    training.executor.close()
    assert isinstance(training.executor.failure, DiskError)
    assert str(tmp_path) in str(training.executor.failure)


@pytest.mark.P6
def test_a_failed_read_for_an_update_that_reads_again_changes_nothing(tmp_path: Path) -> None:
    plan = random_plan(random.Random(1))
    planned = [MovingIteration(plan=plan, prefetches=True, writes_states=True) for _ in range(3)]
    training = MovingTraining(MODEL, plan, HostDevice(), [tmp_path])
    found = []
    for number, iteration in enumerate(planned):
        with mock.patch.object(os, "preadv", side_effect=OSError(errno.EIO, "EIO")):
            training.executor.prefetch()
            # The iteration writes states first, so that all reads are made again.
            training.executor.sync_states_to_host()
            training.executor._threads.drain()
        found.extend(training.run(number, iteration))
    assert same([*found, *training.end()], train_serially(MODEL, planned))


def test_a_short_transfer_goes_on_at_the_last_whole_page(tmp_path: Path) -> None:
    file = StateFile(tmp_path, 2**16)
    file.reserve(0, 2**16)
    source = memoryview(bytearray(random.Random(0).randbytes(2**16)))
    preadv, pwritev = os.preadv, os.pwritev

    def short(transfer: Callable[..., int]) -> Callable[..., int]:
        return lambda fd, buffers, offset: transfer(fd, [buffers[0][: min(len(buffers[0]), 4096 + 512)]], offset)

    # The page cache takes memory at any address. It is used if a mapping differs from direct I/O.
    assert file.is_direct
    with mock.patch.object(StateFile, "read"):
        file.check_coherence(0)
    assert not file.is_direct
    with mock.patch.multiple(os, preadv=short(preadv), pwritev=short(pwritev)):
        file.write(source, 0)
        target = memoryview(bytearray(2**16))
        file.read(target, 0)
    assert target == source


def test_training_goes_on_if_the_folder_is_removed_and_leaves_no_descriptor_open(tmp_path: Path) -> None:
    folder, planned = tmp_path / "states", iterations(random.Random(5), 4)
    folder.mkdir()
    training = MovingTraining(MODEL, planned[0].plan, HostDevice(), [folder])
    folder.rmdir()
    assert same(training.train(planned), train_serially(MODEL, planned))
    del training
    gc.collect()
    descriptors = Path("/proc/self/fd").iterdir()
    assert not [path for path in descriptors if path.is_symlink() and str(tmp_path) in os.readlink(path)]
