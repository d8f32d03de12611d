"""Choose the cores for this rank's CPU updates, together with the other ranks of its node."""

from __future__ import annotations

import os
import platform

from deep_opt_states.config import Config
from deep_opt_states.host import machine
from deep_opt_states.host.cores import CoreShare, RankPlace, allowed_cpus, choose_cores, part_of_quota
from deep_opt_states.host.machine import cores_of, gpu_node
from deep_opt_states.profiler.ranks import Ranks, call_on_all_ranks
from deep_opt_states.zero.internals.agreement import raise_together
from deep_opt_states.zero.internals.log import log_rank_0
from deep_opt_states.zero.start.devices import AcceleratorChoice


def share_cores(config: Config, accelerator: AcceleratorChoice) -> CoreShare:
    """Return the cores for this rank's CPU updates and log them. Bind nothing yet. This is a collective over all ranks.

    Raise ``ConfigError`` if this rank cannot have ``cpu_threads`` threads, ``RanksDisagree`` if another rank cannot.
    """
    share = raise_together(lambda: core_share(accelerator, Ranks(), config))
    omp = os.environ.get("OMP_NUM_THREADS")
    for_pytorch = f"; OMP_NUM_THREADS={omp} is for PyTorch's operations" if omp else ""
    log_rank_0(f"CPU update on rank 0: {share}{for_pytorch}")
    return share


def core_share(accelerator: AcceleratorChoice, ranks: Ranks, config: Config | None = None) -> CoreShare:
    """Return the cores that training with ``config`` uses, which defaults to an empty block.

    This is a collective over ``ranks``, which need not train. Raise ``ConfigError``, on this rank alone, if it cannot
    have ``cpu_threads`` threads.
    """
    config = config or Config()
    on_accelerator = not accelerator.slots_on_host
    hosts = ranks.gather(
        call_on_all_ranks(
            ranks,
            lambda: (
                machine.kernel_id(),
                platform.node(),
                machine.cores().quota,
                cores_of(allowed_cpus()),
                gpu_node() if on_accelerator else None,
            ),
        )
    )
    # All containers on a node run on one kernel, on which a CPU has one number. A quota is that of one container.
    node = [rank for rank, (kernel, *_) in enumerate(hosts) if kernel == hosts[ranks.rank][0]]
    places = []
    for rank in node:
        _, container, quota, cores, near = hosts[rank]
        sharing = [other for other in node if hosts[other][1] == container]
        part = part_of_quota(quota, sharing.index(rank), len(sharing))
        places.append(RankPlace(cores=cores, quota=part, gpu_node=near))
    return choose_cores(
        places,
        node.index(ranks.rank),
        on_accelerator=on_accelerator,
        bind=config.bind_cores,
        cpu_threads=config.cpu_threads,
    )
