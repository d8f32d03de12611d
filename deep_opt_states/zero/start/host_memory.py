"""Whether the host has room for the states of all ranks, and lets them be locked, before any of them allocates."""

from __future__ import annotations

import mmap
import platform
from dataclasses import dataclass
from typing import Any

from deep_opt_states.device.interface import Device
from deep_opt_states.device.slab import LOCK_REMEDY, HostMemoryError
from deep_opt_states.host import machine
from deep_opt_states.profiler.ranks import Ranks


@dataclass(frozen=True, kw_only=True)
class HostRoom:
    """Bytes that this node has left: ``available_bytes`` of its memory, ``container_bytes`` of what the container may
    take (None: unlimited)."""

    available_bytes: int
    container_bytes: int | None

    @classmethod
    def here(cls) -> HostRoom:
        return cls(
            available_bytes=machine.memory().available_bytes,
            container_bytes=machine.memory_left_bytes(machine.cgroup_folders("memory")),
        )


@dataclass(frozen=True, kw_only=True)
class SharingRanks:
    """How many ranks, this one included, take of the same memory: its node's, its container's."""

    on_node: int
    in_container: int

    @classmethod
    def of(cls, ranks: Ranks) -> SharingRanks:
        """A node is one kernel, under which each container has a host name of its own. A collective over ``ranks``."""
        everybody = ranks.gather((machine.kernel_id(), platform.node()))
        here = everybody[ranks.rank]
        return cls(on_node=sum(kernel == here[0] for kernel, _ in everybody), in_container=everybody.count(here))


def check_room(slab_bytes: int, numel: int, ranks: SharingRanks, room: HostRoom) -> None:
    """``slab_bytes`` for ``numel`` parameters are what each of the ``ranks`` is about to take.

    Raises ``HostMemoryError``.
    """
    for place, sharing, what, allowed_bytes, remedy in (
        ("node", ranks.on_node, "the memory that is available", room.available_bytes, "Free memory on it"),
        ("container", ranks.in_container, "what it may still take", room.container_bytes, "Raise its memory limit"),
    ):
        needed_bytes = sharing * slab_bytes
        if allowed_bytes is not None and needed_bytes > allowed_bytes:
            raise HostMemoryError(
                f"The optimizer states of a {place} must fit {what}, {_size(allowed_bytes)}; found "
                f"{_size(needed_bytes)} needed: {_what(slab_bytes, numel)} of each of {sharing} "
                f"rank{'' if sharing == 1 else 's'}.\n"
                f"{remedy}, or train on more nodes."
            )


def check_locking(slab_bytes: int, numel: int, device: Device[Any], limit_bytes: int | None) -> None:
    """``slab_bytes`` for ``numel`` parameters are what ``device`` is about to page-lock for this rank.

    The memlock limit, ``limit_bytes`` (None: unlimited), is the kernel's, for mlock; whether the driver holds to it is
    up to the driver, which is asked: to lock just more than that, for a moment. With a limit near ``slab_bytes`` that
    takes as long as locking the slab does. Raises ``HostMemoryError``.
    """
    if limit_bytes is None or slab_bytes <= limit_bytes:
        return
    probe = device.host_slab(min(limit_bytes + mmap.PAGESIZE, slab_bytes))
    try:
        probe.lock()
    except HostMemoryError as refused:
        raise HostMemoryError(
            f"What a rank page-locks must be within the memlock limit, {_size(limit_bytes)}, where the driver holds to "
            f"it; found {_what(slab_bytes, numel)}, and more than the limit refused: {refused.__cause__}.\n"
            f"{LOCK_REMEDY}"
        ) from refused
    finally:
        probe.close()


def _what(slab_bytes: int, numel: int) -> str:
    return f"{_size(slab_bytes)} for {numel:,} parameters (fp32 parameters and moments, gradients, 16-bit parameters)"


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.3g} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:.3g} MB"
