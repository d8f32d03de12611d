"""Whether the states of a node fit it: told before anything is allocated."""

from __future__ import annotations

import pytest

from deep_opt_states import machine
from deep_opt_states.zero.host_memory import HostMemoryError, HostRoom, check_room, memlock_warning

GB = 10**9


def room(available: int = 100, container: int | None = None, memlock: int | None = None) -> HostRoom:
    """In GB."""
    container_bytes, memlock_bytes = (None if limit is None else limit * GB for limit in (container, memlock))
    return HostRoom(available_bytes=available * GB, container_bytes=container_bytes, memlock_bytes=memlock_bytes)


def test_what_fits_is_accepted() -> None:
    check_room(40 * GB, 25 * 10**8, 2, room(80))
    check_room(40 * GB, 25 * 10**8, 2, room(80, container=80))


def test_what_does_not_fit_is_refused_with_what_is_needed_by_what_and_what_is_allowed() -> None:
    with pytest.raises(HostMemoryError) as caught:
        check_room(40 * GB, 2_500_000_000, 2, room(79))
    assert str(caught.value) == (
        "The optimizer states of a node must fit the memory that is available, 79 GB; found 80 GB needed: 40 GB for "
        "2,500,000,000 parameters (fp32 parameters and moments, gradients, 16-bit parameters) of each of 2 ranks.\n"
        "Free memory on it, or train on more nodes."
    )
    with pytest.raises(HostMemoryError, match=r"container may still take, 39 GB; found 40 GB .* 1 rank\.") as caught:
        check_room(40 * GB, 2_500_000_000, 1, room(container=39))
    assert "Raise the container's memory limit" in str(caught.value)


def test_a_low_memlock_limit_is_told_and_not_refused() -> None:
    assert memlock_warning(40 * GB, room()) == memlock_warning(40 * GB, room(memlock=40)) == ""
    assert "40 GB are about to be page-locked, and the memlock limit is 8 GB" in memlock_warning(
        40 * GB, room(memlock=8)
    )


def test_this_machine_has_room_for_a_byte_and_not_for_all_the_world() -> None:
    check_room(1, 1, 1, HostRoom.here())
    with pytest.raises(HostMemoryError):
        check_room(10**18, 10**17, 1, HostRoom.here())


def test_the_containers_room_is_what_its_limits_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "memory_left_bytes", lambda folders: 5)
    assert HostRoom.here().container_bytes == 5
