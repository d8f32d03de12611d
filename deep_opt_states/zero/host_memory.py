"""Whether the host has room for the states of all ranks, before any of them allocates."""

from __future__ import annotations

import platform
from dataclasses import dataclass

from deep_opt_states import machine
from deep_opt_states.device.slab import HostMemoryError
from deep_opt_states.profiler.ranks import Ranks


@dataclass(frozen=True, kw_only=True)
class HostRoom:
    """Bytes that this node has left: ``available_bytes`` of its memory, ``container_bytes`` of what the container may
    take (None: unlimited); ``memlock_bytes`` is how much a process may lock (None: unlimited)."""

    available_bytes: int
    container_bytes: int | None
    memlock_bytes: int | None

    @classmethod
    def here(cls) -> HostRoom:
        return cls(
            available_bytes=machine.memory().available_bytes,
            container_bytes=machine.memory_left_bytes(machine.cgroup_folders("memory")),
            memlock_bytes=machine.memlock_limit_bytes(),
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

    Raises ``HostMemoryError``. The memlock limit is not refused here: see ``memlock_warning``.
    """
    for place, sharing, what, allowed_bytes, remedy in (
        ("node", ranks.on_node, "the memory that is available", room.available_bytes, "Free memory on it"),
        ("container", ranks.in_container, "what it may still take", room.container_bytes, "Raise its memory limit"),
    ):
        needed_bytes = sharing * slab_bytes
        if allowed_bytes is not None and needed_bytes > allowed_bytes:
            raise HostMemoryError(
                f"The optimizer states of a {place} must fit {what}, {_gigabytes(allowed_bytes)}; found "
                f"{_gigabytes(needed_bytes)} needed: {_gigabytes(slab_bytes)} for {numel:,} parameters (fp32 "
                f"parameters and moments, gradients, 16-bit parameters) of each of {sharing} "
                f"rank{'' if sharing == 1 else 's'}.\n"
                f"{remedy}, or train on more nodes."
            )


def memlock_warning(slab_bytes: int, room: HostRoom) -> str:
    """What to say where the limit is below what is page-locked; empty where it is not.

    The limit is the kernel's, for mlock; whether registering memory with CUDA counts is up to the driver.
    """
    if room.memlock_bytes is None or slab_bytes <= room.memlock_bytes:
        return ""
    return (
        f"{_gigabytes(slab_bytes)} are about to be page-locked, and the memlock limit is "
        f"{_gigabytes(room.memlock_bytes)}: if that fails, ulimit -l unlimited, or docker run --ulimit memlock=-1."
    )


def _gigabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.3g} GB"
