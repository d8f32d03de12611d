"""Host memory that an engine of two ranks finds, or does not find, for its states; and how it takes it."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from unittest import mock

import pytest
import torch.distributed as dist

from deep_opt_states.device.cpu import HostDevice
from deep_opt_states.device.slab import HostMemoryError, HostSlab, Register
from deep_opt_states.host import machine
from deep_opt_states.zero.internals.agreement import RanksDisagree
from deep_opt_states.zero.start.host_memory import HostRoom
from perf_model.prediction.memory import Where
from tests.zero.parity.arm import closing_engine, make_engine
from tests.zero.parity.case import CPU, Case
from tests.zero.process_group import process_group

CASE = Case(name="room", blocks=(CPU,), world_size=2, steps=1)

LIMIT_BYTES = 4096
"""Less than the states of a rank take."""


@contextmanager
def room_for(available_bytes: int) -> Iterator[None]:
    room = HostRoom(available_bytes=available_bytes, container_bytes=None)
    with mock.patch.object(HostRoom, "here", return_value=room):
        yield


def a_rank_without_room_stops_all() -> None:
    failure = RanksDisagree if dist.get_rank() == 0 else HostMemoryError
    with room_for(10**12 if dist.get_rank() == 0 else 10), pytest.raises(failure, match="must fit the memory that is"):
        make_engine(CASE, CPU)
    print("a rank without room stopped all", flush=True)


def a_nodes_ranks_share_its_room() -> None:
    with closing_engine(CASE, CPU) as engine:
        (slab_bytes,) = (its.each_bytes for its in engine.optimizer.ledger.reserved if its.where is Where.PINNED)
    with room_for(2 * slab_bytes), closing_engine(CASE, CPU):
        pass
    with room_for(2 * slab_bytes - 1), pytest.raises(HostMemoryError, match="2 ranks"):
        make_engine(CASE, CPU)
    elsewhere = mock.patch.object(machine, "kernel_id", return_value=f"kernel {dist.get_rank()}")
    with elsewhere, room_for(slab_bytes), closing_engine(CASE, CPU):
        pass
    print("a node's ranks share its room", flush=True)


def a_rank_that_may_not_lock_stops_all() -> None:
    asked: list[int] = []

    def refuse(address: int, size_bytes: int) -> Callable[[], object]:
        asked.append(size_bytes)
        raise RuntimeError("CUDA error: out of memory")

    limited = dist.get_rank() == 0
    failure = HostMemoryError if limited else RanksDisagree
    limit = memlock_limit(LIMIT_BYTES if limited else None)
    with limit, locking_by(refuse), pytest.raises(failure, match="be within the memlock limit"):
        make_engine(CASE, CPU)
    assert asked == ([LIMIT_BYTES + mmap.PAGESIZE] if limited else []), "before any states were allocated"
    print("a rank that may not lock stopped all", flush=True)


def a_driver_that_does_not_hold_to_the_limit_stops_nobody() -> None:
    asked: list[int] = []
    locked: list[int] = []

    def register(address: int, size_bytes: int) -> Callable[[], object]:
        asked.append(size_bytes)
        locked.append(size_bytes)
        return lambda: locked.remove(size_bytes)

    with memlock_limit(LIMIT_BYTES), locking_by(register), closing_engine(CASE, CPU) as engine:
        (slab_bytes,) = (its.each_bytes for its in engine.optimizer.ledger.reserved if its.where is Where.PINNED)
        assert asked == [LIMIT_BYTES + mmap.PAGESIZE, slab_bytes]
        assert locked == [slab_bytes], "what was tried is given back"
    print("a driver that does not hold to the limit stopped nobody", flush=True)


def the_states_are_locked_in_place() -> None:
    """A page that is not there when it is locked would be put near the core that locks it."""
    calls: list[object] = []

    def register(address: int, size_bytes: int) -> Callable[[], object]:
        calls.append(("locked with all pages in place", pages_in_place(address, size_bytes)))
        return lambda: calls.append("unlocked")

    with locking_by(register), closing_engine(CASE, CPU):
        assert calls == [("locked with all pages in place", True)], calls
    assert calls[1:] == ["unlocked"], calls
    print("the states were locked in place", flush=True)


def memlock_limit(limit_bytes: int | None) -> AbstractContextManager[object]:
    return mock.patch.object(machine, "memlock_limit_bytes", return_value=limit_bytes)


def locking_by(register: Register) -> AbstractContextManager[object]:
    return mock.patch.object(HostDevice, "host_slab", lambda device, size_bytes: HostSlab(size_bytes, register))


def pages_in_place(address: int, size_bytes: int) -> bool:
    pages = (ctypes.c_ubyte * -(-size_bytes // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), pages) == 0
    return all(page & 1 for page in pages)


if __name__ == "__main__":
    with process_group():
        a_rank_without_room_stops_all()
        a_nodes_ranks_share_its_room()
        a_rank_that_may_not_lock_stops_all()
        a_driver_that_does_not_hold_to_the_limit_stops_nobody()
        the_states_are_locked_in_place()
