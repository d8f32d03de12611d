"""Before anything is allocated, a rank checks whether the states of its node fit in memory and can be locked."""

from __future__ import annotations

import mmap
import platform
import re
import threading
from collections.abc import Callable

import pytest

from deep_opt_states.device.cpu import HostDevice
from deep_opt_states.device.slab import HostMemoryError, HostSlab
from deep_opt_states.host import machine
from deep_opt_states.profiler.ranks import Ranks
from deep_opt_states.zero.start.node_share import FreeHostMemory, SharingRanks, check_free_memory, check_locking
from tests.profiler.threads import on_ranks

GB = 10**9
TWO_RANKS = SharingRanks(on_node=2, in_container=2)
TWO_CONTAINERS = SharingRanks(on_node=2, in_container=1)


def free_memory(available_gb: int = 100, container_gb: int | None = None) -> FreeHostMemory:
    """Return the free memory of a node, and of a container if it has a limit."""
    return FreeHostMemory(
        available_bytes=available_gb * GB, container_bytes=None if container_gb is None else container_gb * GB
    )


def test_states_that_fit_are_accepted() -> None:
    check_free_memory(40 * GB, 2_500_000_000, TWO_RANKS, free_memory(80))
    check_free_memory(40 * GB, 2_500_000_000, TWO_RANKS, free_memory(80, container_gb=80))


def test_states_that_do_not_fit_are_refused_with_the_ranks_and_the_needed_and_free_memory() -> None:
    with pytest.raises(HostMemoryError) as caught:
        check_free_memory(40 * GB, 2_500_000_000, TWO_RANKS, free_memory(79))
    assert str(caught.value) == (
        "The optimizer states on a node must fit into its available memory, of which 79.0 GB are free; found 80.0 GB "
        "needed, by 2 ranks with 40.0 GB for 2,500,000,000 parameters (masters and moments, gradients, rounded "
        "parameters) each.\n"
        "Free memory on it, train on more nodes, or keep states in bf16, which changes the numerics."
    )
    with pytest.raises(HostMemoryError) as caught:
        check_free_memory(40 * GB, 2_500_000_000, TWO_CONTAINERS, free_memory(container_gb=39))
    assert str(caught.value) == (
        "The optimizer states in a container must fit into its memory limit, of which 39.0 GB are free; found 40.0 GB "
        "needed, by 1 rank with 40.0 GB for 2,500,000,000 parameters (masters and moments, gradients, rounded "
        "parameters) each.\n"
        "Raise its memory limit, train on more nodes, or keep states in bf16, which changes the numerics."
    )


def test_the_ranks_of_all_containers_share_the_nodes_memory() -> None:
    check_free_memory(40 * GB, 2_500_000_000, TWO_CONTAINERS, free_memory(80, container_gb=40))
    with pytest.raises(HostMemoryError, match=r"on a node .* 79.0 GB are free; found 80.0 GB .* 2 ranks"):
        check_free_memory(40 * GB, 2_500_000_000, TWO_CONTAINERS, free_memory(79, container_gb=40))


def test_each_rank_counts_the_ranks_of_its_own_node_and_container(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check with equal host names on different nodes: "b" on the second node is another container than on the first."""
    places = [("first", "a"), ("second", "b"), ("first", "a"), ("first", "b"), ("second", "b")]
    monkeypatch.setattr(machine, "kernel_id", lambda: places[here.rank][0])
    monkeypatch.setattr(platform, "node", lambda: places[here.rank][1])
    here = threading.local()

    def count(ranks: Ranks) -> SharingRanks:
        here.rank = ranks.rank
        return SharingRanks.gather(ranks)

    assert on_ranks(5, count) == [
        SharingRanks(on_node=3, in_container=2),
        SharingRanks(on_node=2, in_container=2),
        SharingRanks(on_node=3, in_container=2),
        SharingRanks(on_node=3, in_container=1),
        SharingRanks(on_node=2, in_container=2),
    ]


class Driver(HostDevice):
    """A device that page-locks at most ``allowed_bytes``, in whole pages.

    ``requested`` lists the bytes of all requests, ``locked`` the bytes that are locked, by address.
    """

    def __init__(self, allowed_bytes: float) -> None:
        self._allowed_bytes = allowed_bytes
        self.requested: list[int] = []
        self.locked: dict[int, int] = {}

    def host_slab(self, size_bytes: int) -> HostSlab:
        return HostSlab(size_bytes, self._register)

    def _register(self, address: int, size_bytes: int) -> Callable[[], object]:
        self.requested.append(size_bytes)
        if -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE > self._allowed_bytes:
            raise RuntimeError("CUDA error: out of memory")
        self.locked[address] = size_bytes
        return lambda: self.locked.pop(address)


LIMIT = 8 * 2**20


def test_a_driver_that_enforces_the_memlock_limit_is_detected_before_the_states_are_allocated() -> None:
    driver = Driver(allowed_bytes=LIMIT)
    with pytest.raises(HostMemoryError) as caught:
        check_locking(40 * GB, 2_500_000_000, driver, LIMIT)
    assert str(caught.value) == (
        "The memory that a rank page-locks must be within the memlock limit, 8.39 MB, if the driver enforces it; found "
        "40.0 GB for 2,500,000,000 parameters (masters and moments, gradients, rounded parameters), and a trial "
        "above the limit failed: CUDA error: out of memory.\n"
        "Raise the memlock limit (ulimit -l unlimited; for a container --ulimit memlock=-1), or train on more ranks."
    )
    assert driver.requested == [LIMIT + mmap.PAGESIZE]
    assert driver.locked == {}


def test_a_driver_that_ignores_the_memlock_limit_is_accepted() -> None:
    driver = Driver(allowed_bytes=float("inf"))
    check_locking(40 * GB, 2_500_000_000, driver, LIMIT)
    assert driver.requested == [LIMIT + mmap.PAGESIZE]
    assert driver.locked == {}, "the trial allocation is unlocked again"


def test_the_trial_locks_no_more_than_the_states_need() -> None:
    driver = Driver(allowed_bytes=LIMIT)
    with pytest.raises(HostMemoryError):
        check_locking(LIMIT + 1, 1, driver, LIMIT)
    assert driver.requested == [LIMIT + 1]


@pytest.mark.parametrize("limit_bytes", [None, LIMIT])
def test_there_is_no_trial_if_the_memlock_limit_suffices(limit_bytes: int | None) -> None:
    driver = Driver(allowed_bytes=0)
    check_locking(LIMIT, 1, driver, limit_bytes)
    assert driver.requested == []


def test_the_cpu_accelerator_locks_nothing_and_has_no_limit() -> None:
    check_locking(40 * GB, 2_500_000_000, HostDevice(), LIMIT)


def test_this_machine_has_memory_for_a_byte_but_not_for_an_exabyte() -> None:
    check_free_memory(1, 1, TWO_RANKS, FreeHostMemory.measure())
    with pytest.raises(HostMemoryError):
        check_free_memory(10**18, 10**17, TWO_RANKS, FreeHostMemory.measure())


def test_the_remedy_for_eager_units_that_do_not_fit_is_named_first() -> None:
    free = free_memory(available_gb=100)
    check_free_memory(40 * GB, 10**9, TWO_RANKS, free, 10 * GB)
    with pytest.raises(HostMemoryError, match=re.escape('Set "eager": false. Or: Free memory')):
        check_free_memory(40 * GB, 10**9, TWO_RANKS, free, 12 * GB)


def test_the_free_memory_of_a_container_is_measured_from_its_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "memory_left_bytes", lambda folders: 5)
    assert FreeHostMemory.measure().container_bytes == 5
