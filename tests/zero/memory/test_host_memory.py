"""Before anything is allocated, ranks check whether the states of their node fit in memory and can be locked."""

from __future__ import annotations

import ctypes
import mmap
import platform
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from deep_opt_states.device.cpu import HostDevice
from deep_opt_states.device.slab import HostMemoryError, HostSlab, Register
from deep_opt_states.host import machine
from deep_opt_states.runtime import state_memory
from deep_opt_states.zero.internals.agreement import RanksDisagree
from deep_opt_states.zero.start.node_share import FreeHostMemory, SharingRanks, check_free_memory, free_share_bytes
from perf_model.prediction.memory import MemoryKind
from tests.ranks import ranks
from tests.zero.parity.case import CPU, STRIDE_2, Case, eager
from tests.zero.parity.training import (
    assert_same_bits,
    closing_engine,
    counted_speculations,
    make_engine,
    shared_folder,
    train,
)

GB = 10**9
STATES = (40 * GB, 2_500_000_000)
TWO_RANKS, TWO_CONTAINERS = SharingRanks(on_node=2, in_container=2), SharingRanks(on_node=2, in_container=1)
NEEDED = "for 2,500,000,000 parameters (masters and moments, gradients, rounded parameters)"


def free_memory(available_gb: int, container_gb: int = 10**6) -> FreeHostMemory:
    return FreeHostMemory(available_bytes=available_gb * GB, container_bytes=container_gb * GB)


def test_states_are_accepted_if_they_fit_and_otherwise_refused_with_the_needed_and_free_memory() -> None:
    check_free_memory(*STATES, TWO_RANKS, free_memory(80, container_gb=80))
    with pytest.raises(HostMemoryError) as caught:
        check_free_memory(*STATES, TWO_RANKS, FreeHostMemory(available_bytes=79 * GB, container_bytes=None))
    assert str(caught.value) == (
        "The optimizer states on a node must fit into its available memory, of which 79.0 GB are free; found 80.0 GB "
        f"needed, by 2 ranks with 40.0 GB {NEEDED} each.\n"
        "Free memory on it, train on more nodes, or keep states in bf16, which changes the numerics."
    )
    # The ranks of all containers share the node's memory.
    check_free_memory(*STATES, TWO_CONTAINERS, free_memory(80, container_gb=40))
    with pytest.raises(HostMemoryError, match=r"on a node .* 79.0 GB are free; found 80.0 GB .* 2 ranks"):
        check_free_memory(*STATES, TWO_CONTAINERS, free_memory(79, container_gb=40))
    with pytest.raises(HostMemoryError, match=r"in a container .* 39.0 GB are free; found 40.0 GB .* by 1 rank .*"):
        check_free_memory(*STATES, TWO_CONTAINERS, free_memory(100, container_gb=39))
    # Eager units account for 10 of the 40 GB.
    with pytest.raises(HostMemoryError, match=r'Set "eager": false\. Or: Free memory'):
        check_free_memory(*STATES, TWO_RANKS, free_memory(100), 12 * GB)


def test_the_free_memory_is_measured_also_from_the_limits_of_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1 < FreeHostMemory.measure().available_bytes < 10**18
    monkeypatch.setattr(machine, "memory_left_bytes", lambda folders: 5)
    assert FreeHostMemory.measure().container_bytes == 5


def test_each_rank_counts_the_ranks_of_its_own_node_and_container(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check with equal host names on different nodes: "b" on the second node is another container than on the first."""
    places = [("first", "a"), ("second", "b"), ("first", "a"), ("first", "b"), ("second", "b")]

    def count(rank: int) -> tuple[int, int]:
        monkeypatch.setattr(machine, "kernel_id", lambda: places[rank][0])
        monkeypatch.setattr(platform, "node", lambda: places[rank][1])
        ranks = mock.Mock(rank=rank, gather=mock.Mock(return_value=places))
        sharing = SharingRanks.gather(ranks)
        ranks.gather.assert_called_once_with(places[rank])
        return sharing.on_node, sharing.in_container

    assert [*map(count, range(5))] == [(3, 2), (2, 2), (3, 2), (3, 1), (2, 2)]


class Driver:
    """A driver that page-locks memory unless it ``refuses``, and lists all requests and what is locked."""

    def __init__(self, *, refuses: bool) -> None:
        self._refuses = refuses
        self.requested: list[int] = []
        self.locked: dict[int, int] = {}
        self.had_all_pages = True

    def register(self, address: int, size_bytes: int) -> Callable[[], object]:
        self.requested.append(size_bytes)
        if self._refuses:
            raise RuntimeError("CUDA error: out of memory")
        pages = (ctypes.c_ubyte * -(-size_bytes // mmap.PAGESIZE))()
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), pages) == 0
        self.had_all_pages = all(page & 1 for page in pages)
        self.locked[address] = size_bytes
        return lambda: self.locked.pop(address)


CASE = Case(name="host memory", blocks=(CPU,), world_size=2, steps=1)


def measured(available_bytes: int, container_bytes: int | None = None) -> AbstractContextManager[object]:
    free = FreeHostMemory(available_bytes=available_bytes, container_bytes=container_bytes)
    return mock.patch.object(FreeHostMemory, "measure", return_value=free)


def memlock_limit(limit_bytes: int | None) -> AbstractContextManager[object]:
    return mock.patch.object(machine, "memlock_limit_bytes", return_value=limit_bytes)


def locked_with(register: Register) -> AbstractContextManager[object]:
    return mock.patch.object(HostDevice, "host_slab", lambda device, size_bytes: HostSlab(size_bytes, register))


def slab_bytes(engine: Any) -> int:
    """Return the size of the largest page-locked memory, the slab. The one of persistent parameters is smaller."""
    reserved = engine.optimizer.accounting_device.reserved
    return max(item.each_bytes for item in reserved if item.kind is MemoryKind.PINNED)


@ranks(2)
def test_the_ranks_of_a_node_share_its_memory_and_one_without_memory_stops_all() -> None:
    with closing_engine(CASE, CPU) as engine:
        needed_bytes = slab_bytes(engine)
    with measured(2 * needed_bytes), closing_engine(CASE, CPU):
        pass
    with measured(2 * needed_bytes - 1), pytest.raises(HostMemoryError, match="2 ranks"):
        make_engine(CASE, CPU)
    on_different_nodes = mock.patch.object(machine, "kernel_id", return_value=f"kernel {dist.get_rank()}")
    with on_different_nodes, measured(needed_bytes), closing_engine(CASE, CPU):
        pass
    failure = RanksDisagree if dist.get_rank() == 0 else HostMemoryError
    with measured((10**12, 10)[dist.get_rank()]), pytest.raises(failure, match="must fit into its available memory"):
        make_engine(CASE, CPU)


@ranks(2)
def test_a_rank_that_cannot_lock_memory_stops_all_ranks_and_a_driver_may_ignore_the_limit() -> None:
    """Check also that all pages are in memory when they are locked: a missing one would be near the locking core."""
    limit_bytes = mmap.PAGESIZE
    limited = dist.get_rank() == 0
    refusing, ignoring = Driver(refuses=True), Driver(refuses=False)
    failure = HostMemoryError if limited else RanksDisagree
    limit = memlock_limit(limit_bytes if limited else None)
    message = (
        r"(?s)within the memlock limit, 4.1\d? kB, if .*; found [\d.]+ [kM]B for [\d,]+ parameters .* a trial above "
        r"the limit failed: CUDA error: out of memory.*Raise the memlock limit.*--ulimit memlock=-1"
    )
    with limit, locked_with(refusing.register), pytest.raises(failure, match=message):
        make_engine(CASE, CPU)
    assert refusing.requested == ([2 * limit_bytes] if limited else []), "before any states were allocated"
    with memlock_limit(limit_bytes), locked_with(ignoring.register), closing_engine(CASE, CPU) as engine:
        assert ignoring.requested == [2 * limit_bytes, slab_bytes(engine)]
        assert list(ignoring.locked.values()) == [slab_bytes(engine)], "the trial allocation is unlocked again"
        assert ignoring.had_all_pages
    assert ignoring.locked == {}
    enough = Driver(refuses=False)
    with memlock_limit(10**12), locked_with(enough.register), closing_engine(CASE, CPU) as engine:
        assert enough.requested == [slab_bytes(engine)], "no trial"


def test_ranks_share_the_memory_of_the_node_and_of_their_container() -> None:
    for container_bytes, share_bytes in ((None, 250), (300, 150), (0, 0)):
        with measured(1000, container_bytes):
            assert free_share_bytes(SharingRanks(on_node=4, in_container=2)) == share_bytes


@ranks(2)
def test_a_rank_whose_host_refuses_second_versions_of_states_trains_without_them() -> None:
    """Check it at the start, and when the host has the memory later."""
    case = Case(name="refused", blocks=(eager(STRIDE_2),), world_size=2, steps=2)
    refuses = dist.get_rank() == 1
    slab = mock.patch.object(state_memory, "HostSlab", side_effect=HostMemoryError("1 GB refused"))
    slab = slab if refuses else nullcontext()
    with mock.patch("deep_opt_states.log.warn_this_rank") as warn, shared_folder() as folder:
        with slab:
            engine = make_engine(case, case.blocks[0])
        stock, running = make_engine(case, None), engine.optimizer._running
        plan = running.plan
        assert plan.eager

        def same_as_stock(eager_here: frozenset[int]) -> None:
            assert running.eager == eager_here
            with counted_speculations() as counts:
                assert_same_bits(train(stock, case, folder), train(engine, case, folder))
            assert (counts.kept > 0) == bool(eager_here)

        refused = frozenset() if refuses else plan.eager
        same_as_stock(refused)
        running.adopt(plan)
        assert running.restore()
        same_as_stock(plan.eager)
        for each in (engine, stock):
            each.destroy()
    lines = [call.args[0] for call in warn.call_args_list if "refused" in str(call)]
    assert lines == ["updates do not start in backward on this rank. 1 GB refused"] * refuses
