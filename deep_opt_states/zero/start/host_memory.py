"""Check that the states of all ranks fit into host memory and can be page-locked, before any rank allocates them."""

from __future__ import annotations

import mmap
import platform
from dataclasses import dataclass
from typing import Any

from deep_opt_states.device.interface import Device
from deep_opt_states.device.slab import LOCK_REMEDY, HostMemoryError
from deep_opt_states.host import machine
from deep_opt_states.profiler.ranks import Ranks
from perf_model.units import size


@dataclass(frozen=True, kw_only=True)
class FreeHostMemory:
    """The host memory that is free on this node and in this container."""

    available_bytes: int
    """Bytes of the node's memory that are available."""
    container_bytes: int | None
    """Bytes that the container may still use; None if it has no limit."""

    @classmethod
    def measure(cls) -> FreeHostMemory:
        """Return the host memory that is free now."""
        return cls(
            available_bytes=machine.memory().available_bytes,
            container_bytes=machine.memory_left_bytes(machine.cgroup_folders("memory")),
        )


@dataclass(frozen=True, kw_only=True)
class SharingRanks:
    """The numbers of ranks, including this one, that share memory with this rank."""

    on_node: int
    """Ranks on this rank's node."""
    in_container: int
    """Ranks in this rank's container."""

    @classmethod
    def gather(cls, ranks: Ranks) -> SharingRanks:
        """Count the ranks that share memory with this one. This is a collective over ``ranks``.

        A node is one running kernel, and each container on it has a host name of its own.
        """
        locations = ranks.gather((machine.kernel_id(), platform.node()))
        here = locations[ranks.rank]
        return cls(on_node=sum(kernel == here[0] for kernel, _ in locations), in_container=locations.count(here))


def check_free_memory(slab_bytes: int, numel: int, ranks: SharingRanks, free: FreeHostMemory) -> None:
    """Check that ``slab_bytes`` for ``numel`` parameters, which each of the ``ranks`` allocates next, are free.

    Raise ``HostMemoryError`` if they are not, on the node or in the container.
    """
    for place, sharing, limit, allowed_bytes, remedy in (
        ("on a node", ranks.on_node, "its available memory", free.available_bytes, "Free memory on it"),
        ("in a container", ranks.in_container, "its memory limit", free.container_bytes, "Raise its memory limit"),
    ):
        needed_bytes = sharing * slab_bytes
        if allowed_bytes is not None and needed_bytes > allowed_bytes:
            raise HostMemoryError(
                f"The optimizer states {place} must fit into {limit}, of which {size(allowed_bytes)} are free; "
                f"found {size(needed_bytes)} needed, by {sharing} rank{'' if sharing == 1 else 's'} with "
                f"{_contents(slab_bytes, numel)} each.\n"
                f"{remedy}, or train on more nodes."
            )


def check_locking(slab_bytes: int, numel: int, device: Device[Any], limit_bytes: int | None) -> None:
    """Check that ``device`` can page-lock ``slab_bytes`` for the ``numel`` parameters of this rank.

    The memlock limit, ``limit_bytes`` (None: unlimited), is the kernel's limit for mlock. Whether it applies to
    page-locking by the driver depends on the driver. So if ``slab_bytes`` exceed the limit, page-lock slightly more
    than the limit as a trial, and free it at once. If the limit is close to ``slab_bytes``, the trial takes as long as
    page-locking the slab. Raise ``HostMemoryError`` if the trial fails.
    """
    if limit_bytes is None or slab_bytes <= limit_bytes:
        return
    probe = device.host_slab(min(limit_bytes + mmap.PAGESIZE, slab_bytes))
    try:
        probe.lock()
    except HostMemoryError as refused:
        raise HostMemoryError(
            f"The memory that a rank page-locks must be within the memlock limit, {size(limit_bytes)}, if the driver "
            f"enforces it; found {_contents(slab_bytes, numel)}, and a trial above the limit failed: "
            f"{refused.__cause__}.\n"
            f"{LOCK_REMEDY}"
        ) from refused
    finally:
        probe.close()


def _contents(slab_bytes: int, numel: int) -> str:
    return f"{size(slab_bytes)} for {numel:,} parameters (masters and moments, gradients, 16-bit parameters)"
