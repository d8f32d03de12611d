"""Whether the states of a node fit it and may be locked: told before anything is allocated."""

from __future__ import annotations

import mmap
import platform
import threading
from collections.abc import Callable

import pytest

from deep_opt_states.device.cpu import HostDevice
from deep_opt_states.device.slab import HostMemoryError, HostSlab
from deep_opt_states.host import machine
from deep_opt_states.profiler.ranks import Ranks
from deep_opt_states.zero.start.host_memory import HostRoom, SharingRanks, check_locking, check_room
from tests.launch import run_ranks
from tests.profiler.threads import on_ranks

GB = 10**9
TWO = SharingRanks(on_node=2, in_container=2)
TWO_CONTAINERS = SharingRanks(on_node=2, in_container=1)


def room(available: int = 100, container: int | None = None) -> HostRoom:
    """In GB."""
    return HostRoom(available_bytes=available * GB, container_bytes=None if container is None else container * GB)


def test_what_fits_is_accepted() -> None:
    check_room(40 * GB, 2_500_000_000, TWO, room(80))
    check_room(40 * GB, 2_500_000_000, TWO, room(80, container=80))


def test_what_does_not_fit_is_refused_with_what_is_needed_by_what_and_what_is_allowed() -> None:
    with pytest.raises(HostMemoryError) as caught:
        check_room(40 * GB, 2_500_000_000, TWO, room(79))
    assert str(caught.value) == (
        "The optimizer states of a node must fit the memory that is available, 79 GB; found 80 GB needed: 40 GB for "
        "2,500,000,000 parameters (fp32 parameters and moments, gradients, 16-bit parameters) of each of 2 ranks.\n"
        "Free memory on it, or train on more nodes."
    )
    with pytest.raises(HostMemoryError) as caught:
        check_room(40 * GB, 2_500_000_000, TWO_CONTAINERS, room(container=39))
    assert str(caught.value) == (
        "The optimizer states of a container must fit what it may still take, 39 GB; found 40 GB needed: 40 GB for "
        "2,500,000,000 parameters (fp32 parameters and moments, gradients, 16-bit parameters) of each of 1 rank.\n"
        "Raise its memory limit, or train on more nodes."
    )


def test_the_ranks_of_all_containers_share_the_nodes_memory() -> None:
    check_room(40 * GB, 2_500_000_000, TWO_CONTAINERS, room(80, container=40))
    with pytest.raises(HostMemoryError, match=r"of a node .* 79 GB; found 80 GB .* 2 ranks"):
        check_room(40 * GB, 2_500_000_000, TWO_CONTAINERS, room(79, container=40))


def test_each_rank_counts_those_of_its_own_node_and_container(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host names need not tell nodes apart: on the second of these, "b" is another container than on the first."""
    places = [("first", "a"), ("second", "b"), ("first", "a"), ("first", "b"), ("second", "b")]
    monkeypatch.setattr(machine, "kernel_id", lambda: places[here.rank][0])
    monkeypatch.setattr(platform, "node", lambda: places[here.rank][1])
    here = threading.local()

    def count(ranks: Ranks) -> SharingRanks:
        here.rank = ranks.rank
        return SharingRanks.of(ranks)

    assert on_ranks(5, count) == [
        SharingRanks(on_node=3, in_container=2),
        SharingRanks(on_node=2, in_container=2),
        SharingRanks(on_node=3, in_container=2),
        SharingRanks(on_node=3, in_container=1),
        SharingRanks(on_node=2, in_container=2),
    ]


def test_an_engine_asks_for_room_and_locks_what_it_takes() -> None:
    for finished in run_ranks(2, ["-m", "tests.zero.scripts.room"], timeout_s=120):
        assert finished.returncode == 0, finished.output[-4000:]
        for said in (
            "a rank without room stopped all",
            "a node's ranks share its room",
            "a rank that may not lock stopped all",
            "a driver that does not hold to the limit stopped nobody",
            "the states were locked in place",
        ):
            assert said in finished.output


class Driver(HostDevice):
    """Page-locks ``allowed_bytes`` at most, in whole pages; notes how much it was asked for, and what is locked."""

    def __init__(self, allowed_bytes: float) -> None:
        self._allowed_bytes = allowed_bytes
        self.asked: list[int] = []
        self.locked: dict[int, int] = {}

    def host_slab(self, size_bytes: int) -> HostSlab:
        return HostSlab(size_bytes, self._register)

    def _register(self, address: int, size_bytes: int) -> Callable[[], object]:
        self.asked.append(size_bytes)
        if -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE > self._allowed_bytes:
            raise RuntimeError("CUDA error: out of memory")
        self.locked[address] = size_bytes
        return lambda: self.locked.pop(address)


LIMIT = 8 * 2**20


def test_a_driver_that_holds_to_the_memlock_limit_is_found_out_before_the_states_are_allocated() -> None:
    driver = Driver(allowed_bytes=LIMIT)
    with pytest.raises(HostMemoryError) as caught:
        check_locking(40 * GB, 2_500_000_000, driver, LIMIT)
    assert str(caught.value) == (
        "What a rank page-locks must be within the memlock limit, 8.39 MB, where the driver holds to it; found 40 GB "
        "for 2,500,000,000 parameters (fp32 parameters and moments, gradients, 16-bit parameters), and more than the "
        "limit refused: CUDA error: out of memory.\n"
        "Raise the memlock limit (ulimit -l unlimited; of a container --ulimit memlock=-1), or train on more ranks."
    )
    assert driver.asked == [LIMIT + mmap.PAGESIZE]
    assert driver.locked == {}


def test_a_driver_that_does_not_is_no_reason_to_say_anything() -> None:
    driver = Driver(allowed_bytes=float("inf"))
    check_locking(40 * GB, 2_500_000_000, driver, LIMIT)
    assert driver.asked == [LIMIT + mmap.PAGESIZE]
    assert driver.locked == {}, "what was tried is given back"


def test_no_more_is_tried_than_is_needed() -> None:
    driver = Driver(allowed_bytes=LIMIT)
    with pytest.raises(HostMemoryError):
        check_locking(LIMIT + 1, 1, driver, LIMIT)
    assert driver.asked == [LIMIT + 1]


@pytest.mark.parametrize("limit_bytes", [None, LIMIT])
def test_nothing_is_tried_where_the_memlock_limit_suffices(limit_bytes: int | None) -> None:
    driver = Driver(allowed_bytes=0)
    check_locking(LIMIT, 1, driver, limit_bytes)
    assert driver.asked == []


def test_the_cpu_accelerator_locks_nothing_and_has_no_limit() -> None:
    check_locking(40 * GB, 2_500_000_000, HostDevice(), LIMIT)


def test_this_machine_has_room_for_a_byte_and_not_for_all_the_world() -> None:
    check_room(1, 1, TWO, HostRoom.here())
    with pytest.raises(HostMemoryError):
        check_room(10**18, 10**17, TWO, HostRoom.here())


def test_the_containers_room_is_what_its_limits_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "memory_left_bytes", lambda folders: 5)
    assert HostRoom.here().container_bytes == 5
