"""Choose the cores for this rank's CPU updates, together with the other ranks of its node."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass

from deep_opt_states.config import Config
from deep_opt_states.host import machine
from deep_opt_states.host.affinity import allowed_cpus
from deep_opt_states.host.cores import CoreShare, RankPlace, choose_cores, part_of_quota
from deep_opt_states.host.topology import Core, cores_of, gpu_node
from deep_opt_states.profiler.ranks import Ranks, call_on_all_ranks
from deep_opt_states.zero.internals.agreement import raise_together
from deep_opt_states.zero.internals.log import log_rank_0
from deep_opt_states.zero.start.devices import AcceleratorChoice


@dataclass(frozen=True, kw_only=True)
class _RankHost:
    """The host as one rank sees it.

    A CPU has the same number in all containers on one kernel. A cgroup's quota applies to one container only.
    """

    kernel: str
    """An identifier of the running kernel, which all containers on a node share."""
    host: str
    """The host name, which differs between the containers on a node."""
    cores: tuple[Core, ...]
    """The physical cores that the rank's affinity allows."""
    quota: float | None
    """The CPU time that the cgroup allows, in cores; None if unlimited."""
    gpu_node: int | None
    """The NUMA node of the rank's GPU; None if it is unknown or there is no GPU."""


def share_cores(config: Config, accelerator: AcceleratorChoice) -> CoreShare:
    """Return the cores for this rank's CPU updates and log them. Bind nothing yet. This is a collective over all ranks.

    Raise ``ConfigError`` if this rank cannot have ``cpu_threads`` threads, ``RanksDisagree`` if another rank cannot.
    """
    choose = _chooser(accelerator, Ranks())
    share = raise_together(lambda: choose(config))
    omp = os.environ.get("OMP_NUM_THREADS")
    for_pytorch = f"; OMP_NUM_THREADS={omp} is for PyTorch's operations" if omp else ""
    log_rank_0(f"CPU update on rank 0: {share}{for_pytorch}")
    return share


def default_share(accelerator: AcceleratorChoice, ranks: Ranks) -> CoreShare:
    """Return the cores that training uses with the default config.

    This is a collective over ``ranks``, which need not train.
    """
    return _chooser(accelerator, ranks)(Config())


def _chooser(accelerator: AcceleratorChoice, ranks: Ranks) -> Callable[[Config], CoreShare]:
    """Exchange descriptions of the hosts of all ``ranks``, and return a function that chooses this rank's cores."""

    def describe_host() -> _RankHost:
        return _RankHost(
            kernel=machine.kernel_id(),
            host=platform.node(),
            cores=cores_of(allowed_cpus()),
            quota=machine.cores().quota,
            gpu_node=None if accelerator.slots_on_host else gpu_node(),
        )

    hosts = ranks.gather(call_on_all_ranks(ranks, describe_host))
    node = [rank for rank, host in enumerate(hosts) if host.kernel == hosts[ranks.rank].kernel]
    places = _places([hosts[rank] for rank in node])

    def choose(config: Config) -> CoreShare:
        return choose_cores(
            places,
            node.index(ranks.rank),
            on_accelerator=not accelerator.slots_on_host,
            bind=config.bind_cores,
            cpu_threads=config.cpu_threads,
        )

    return choose


def _places(node: list[_RankHost]) -> list[RankPlace]:
    """Return the cores and the part of its container's quota that each rank of a node may use, by local rank."""
    places = []
    for local_rank, rank_host in enumerate(node):
        container = [other for other, other_host in enumerate(node) if other_host.host == rank_host.host]
        quota = part_of_quota(rank_host.quota, container.index(local_rank), len(container))
        places.append(RankPlace(cores=rank_host.cores, quota=quota, gpu_node=rank_host.gpu_node))
    return places
