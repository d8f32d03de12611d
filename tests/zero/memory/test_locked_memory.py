"""Start engines of two ranks with and without enough host memory for their states, and check how it is locked."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from deep_opt_states.device.cpu import HostDevice
from deep_opt_states.device.slab import HostMemoryError, HostSlab, Register
from deep_opt_states.host import machine
from deep_opt_states.zero.internals.agreement import RanksDisagree
from deep_opt_states.zero.start.node_share import FreeHostMemory
from perf_model.prediction.memory import MemoryKind
from tests.ranks import ranks
from tests.zero.parity.case import CPU, Case
from tests.zero.parity.training import closing_engine, make_engine

CASE = Case(name="host memory", blocks=(CPU,), world_size=2, steps=1)
LIMIT_BYTES = 4096
"""A memlock limit that is smaller than the states of a rank."""


@contextmanager
def free_memory(available_bytes: int) -> Iterator[None]:
    free = FreeHostMemory(available_bytes=available_bytes, container_bytes=None)
    with mock.patch.object(FreeHostMemory, "measure", return_value=free):
        yield


def memlock_limit(limit_bytes: int | None) -> AbstractContextManager[object]:
    return mock.patch.object(machine, "memlock_limit_bytes", return_value=limit_bytes)


def locked_with(register: Register) -> AbstractContextManager[object]:
    return mock.patch.object(HostDevice, "host_slab", lambda device, size_bytes: HostSlab(size_bytes, register))


def pages_in_memory(address: int, size_bytes: int) -> bool:
    pages = (ctypes.c_ubyte * -(-size_bytes // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), pages) == 0
    return all(page & 1 for page in pages)


def slab_bytes(engine: Any) -> int:
    """Return the size of the largest page-locked memory, the slab. The one of persistent parameters is smaller."""
    reserved = engine.optimizer.accounting_device.reserved
    return max(item.each_bytes for item in reserved if item.kind is MemoryKind.PINNED)


@ranks(2)
def test_a_rank_without_memory_stops_all_ranks() -> None:
    failure = RanksDisagree if dist.get_rank() == 0 else HostMemoryError
    with (
        free_memory(10**12 if dist.get_rank() == 0 else 10),
        pytest.raises(failure, match="must fit into its available memory"),
    ):
        make_engine(CASE, CPU)


@ranks(2)
def test_the_ranks_of_a_node_share_its_memory() -> None:
    with closing_engine(CASE, CPU) as engine:
        needed_bytes = slab_bytes(engine)
    with free_memory(2 * needed_bytes), closing_engine(CASE, CPU):
        pass
    with free_memory(2 * needed_bytes - 1), pytest.raises(HostMemoryError, match="2 ranks"):
        make_engine(CASE, CPU)
    on_different_nodes = mock.patch.object(machine, "kernel_id", return_value=f"kernel {dist.get_rank()}")
    with on_different_nodes, free_memory(needed_bytes), closing_engine(CASE, CPU):
        pass


@ranks(2)
def test_a_rank_that_cannot_lock_memory_stops_all_ranks() -> None:
    requested: list[int] = []

    def refuse(address: int, size_bytes: int) -> Callable[[], object]:
        requested.append(size_bytes)
        raise RuntimeError("CUDA error: out of memory")

    limited = dist.get_rank() == 0
    failure = HostMemoryError if limited else RanksDisagree
    limit = memlock_limit(LIMIT_BYTES if limited else None)
    with limit, locked_with(refuse), pytest.raises(failure, match="be within the memlock limit"):
        make_engine(CASE, CPU)
    assert requested == ([LIMIT_BYTES + mmap.PAGESIZE] if limited else []), "before any states were allocated"


@ranks(2)
def test_a_driver_may_ignore_the_memlock_limit() -> None:
    requested: list[int] = []
    locked: list[int] = []

    def register(address: int, size_bytes: int) -> Callable[[], object]:
        requested.append(size_bytes)
        locked.append(size_bytes)
        return lambda: locked.remove(size_bytes)

    with memlock_limit(LIMIT_BYTES), locked_with(register), closing_engine(CASE, CPU) as engine:
        assert requested == [LIMIT_BYTES + mmap.PAGESIZE, slab_bytes(engine)]
        assert locked == [slab_bytes(engine)], "the trial allocation is unlocked again"


@ranks(2)
def test_all_pages_of_the_states_are_in_memory_when_they_are_locked() -> None:
    """Check it because a missing page would be placed near the locking core."""
    calls: list[object] = []

    def register(address: int, size_bytes: int) -> Callable[[], object]:
        calls.append(("locked with all pages in memory", pages_in_memory(address, size_bytes)))
        return lambda: calls.append("unlocked")

    with locked_with(register), closing_engine(CASE, CPU):
        assert calls == [("locked with all pages in memory", True)]
    assert calls[1:] == ["unlocked"]
