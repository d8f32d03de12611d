"""Share the cores and the memory of a node among its ranks, before any rank binds or allocates some."""

from __future__ import annotations

import mmap
import os
import platform
from dataclasses import dataclass
from typing import Any

from deep_opt_states import log
from deep_opt_states.config import Config
from deep_opt_states.device.interface import Device
from deep_opt_states.device.slab import LOCK_REMEDY, HostMemoryError
from deep_opt_states.host import machine
from deep_opt_states.host.cores import CoreShare, RankPlace, allowed_cpus, choose_cores, part_of_quota
from deep_opt_states.host.machine import Core, cores_of, gpu_node
from deep_opt_states.profiler.ranks import Ranks, call_on_all_ranks
from deep_opt_states.zero.internals.agreement import raise_together
from deep_opt_states.zero.start.devices import AcceleratorChoice
from perf_model.units import counted, size


def share_cores(config: Config, accelerator: AcceleratorChoice) -> CoreShare:
    """Return the cores for this rank's CPU updates and log them. This is a collective over all ranks.

    Raise ``ConfigError`` if this rank cannot have ``cpu_threads`` threads, ``RanksDisagree`` if another one cannot.
    """
    share = raise_together(lambda: core_share(accelerator, Ranks(), config))
    omp = os.environ.get("OMP_NUM_THREADS")
    for_pytorch = f"; OMP_NUM_THREADS={omp} is for PyTorch's operations" if omp else ""
    log.info(f"CPU update on rank 0: {share}{for_pytorch}")
    return share


def core_share(accelerator: AcceleratorChoice, ranks: Ranks, config: Config | None = None) -> CoreShare:
    """Return the cores that training with ``config`` uses; it defaults to an empty block."""
    # This is a collective over ``ranks``, but a rank that cannot have ``cpu_threads`` raises ``ConfigError`` alone.
    config = config or Config()
    on_accelerator = not accelerator.slots_on_host
    hosts = ranks.gather(call_on_all_ranks(ranks, lambda: _host(on_accelerator)))
    # All containers on a node run on one kernel, where a CPU has one number. A quota is per container.
    node = [rank for rank, (kernel, *_) in enumerate(hosts) if kernel == hosts[ranks.rank][0]]
    places = []
    for rank in node:
        _, container, quota, cores, near = hosts[rank]
        sharing = [other for other in node if hosts[other][1] == container]
        part = part_of_quota(quota, sharing.index(rank), len(sharing))
        places.append(RankPlace(cores=cores, quota=part, gpu_node=near))
    local_rank = node.index(ranks.rank)
    bind, cpu_threads = config.bind_cores, config.cpu_threads
    return choose_cores(places, local_rank, on_accelerator=on_accelerator, bind=bind, cpu_threads=cpu_threads)


def _host(on_accelerator: bool) -> tuple[str, str, float | None, tuple[Core, ...], int | None]:
    """Return the kernel and the container of this rank, the container's quota, the rank's cores and its GPU's node."""
    near = gpu_node() if on_accelerator else None
    quota = machine.core_quota(machine.cgroup_folders("cpu"))
    return machine.kernel_id(), platform.node(), quota, cores_of(allowed_cpus()), near


@dataclass(frozen=True, kw_only=True)
class FreeHostMemory:
    """The bytes that this node has available, and that this container may still use; None without a limit."""

    available_bytes: int
    container_bytes: int | None

    @classmethod
    def measure(cls) -> FreeHostMemory:
        left_bytes = machine.memory_left_bytes(machine.cgroup_folders("memory"))
        return cls(available_bytes=machine.memory().available_bytes, container_bytes=left_bytes)


@dataclass(frozen=True, kw_only=True)
class SharingRanks:
    """The numbers of ranks on this rank's node and in its container, including this one."""

    on_node: int
    in_container: int

    @classmethod
    def gather(cls, ranks: Ranks) -> SharingRanks:
        """Count the ranks, by the kernel of a node and the host name of a container. This is a collective."""
        locations = ranks.gather((machine.kernel_id(), platform.node()))
        here = locations[ranks.rank]
        return cls(on_node=sum(kernel == here[0] for kernel, _ in locations), in_container=locations.count(here))


def free_share_bytes(ranks: SharingRanks) -> int:
    """Return this rank's share of the host memory that is free now."""
    free = FreeHostMemory.measure()
    shares = [free.available_bytes // ranks.on_node]
    if free.container_bytes is not None:
        shares.append(free.container_bytes // ranks.in_container)
    return max(0, min(shares))


def check_free_memory(
    slab_bytes: int, numel: int, ranks: SharingRanks, free: FreeHostMemory, eager_bytes: int = 0
) -> None:
    """Raise ``HostMemoryError`` unless each of ``ranks`` can have ``slab_bytes`` and ``eager_bytes``."""
    without_eager = 'Set "eager": false. Or: ' if eager_bytes else ""
    and_eager = f" and {size(eager_bytes)} for eager units" if eager_bytes else ""
    for place, sharing, limit, allowed_bytes, remedy in (
        ("on a node", ranks.on_node, "its available memory", free.available_bytes, "Free memory on it"),
        ("in a container", ranks.in_container, "its memory limit", free.container_bytes, "Raise its memory limit"),
    ):
        needed_bytes = sharing * (slab_bytes + eager_bytes)
        if allowed_bytes is not None and needed_bytes > allowed_bytes:
            raise HostMemoryError(
                f"The optimizer states {place} must fit into {limit}, of which {size(allowed_bytes)} are free; "
                f"found {size(needed_bytes)} needed, by {counted(sharing, 'rank')} with "
                f"{_contents(slab_bytes, numel)}{and_eager} each.\n"
                f"{without_eager}{remedy}, train on more nodes, or keep states in bf16, which changes the numerics."
            )


def check_locking(slab_bytes: int, numel: int, device: Device[Any], limit_bytes: int | None) -> None:
    """Raise ``HostMemoryError`` if ``device`` cannot page-lock ``slab_bytes`` for the rank's ``numel`` parameters."""
    # Some drivers ignore the memlock limit, ``limit_bytes`` (None: unlimited). So page-lock slightly more as a trial.
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
    return f"{size(slab_bytes)} for {numel:,} parameters (masters and moments, gradients, rounded parameters)"
