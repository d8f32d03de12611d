"""This rank's cores, chosen with those of the other ranks of its node."""

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
from deep_opt_states.profiler.ranks import Ranks, training_ranks
from deep_opt_states.profiler.ranks import agree as agree_among
from deep_opt_states.zero.internals.agreement import agree
from deep_opt_states.zero.internals.log import say
from deep_opt_states.zero.start.devices import AcceleratorChoice


@dataclass(frozen=True, kw_only=True)
class _Found:
    """By one rank. A kernel numbers its CPUs for all its containers; a cgroup's ``quota`` is for one of these."""

    kernel: str
    host: str
    cores: tuple[Core, ...]
    quota: float | None
    gpu_node: int | None


def share_cores(config: Config, accelerator: AcceleratorChoice) -> CoreShare:
    """The cores of this rank's CPU updates; the log says which. Nothing is bound yet. A collective over all ranks.

    Raises ``ConfigError`` for a ``cpu_threads`` that this rank cannot have, ``RanksDisagree`` if another cannot.
    """
    choose = _chooser(accelerator, training_ranks())
    share = agree(lambda: choose(config), lambda _: "chose its cores")
    omp = os.environ.get("OMP_NUM_THREADS")
    say(f"CPU update on rank 0: {share}" + (f"; OMP_NUM_THREADS={omp} is for PyTorch's operations" if omp else ""))
    return share


def default_share(accelerator: AcceleratorChoice, ranks: Ranks) -> CoreShare:
    """What training takes if the config says nothing. A collective over ``ranks``, which need not train."""
    return _chooser(accelerator, ranks)(Config())


def _chooser(accelerator: AcceleratorChoice, ranks: Ranks) -> Callable[[Config], CoreShare]:
    def find() -> _Found:
        return _Found(
            kernel=machine.kernel_id(),
            host=platform.node(),
            cores=cores_of(allowed_cpus()),
            quota=machine.cores().quota,
            gpu_node=None if accelerator.steps_on_host else gpu_node(),
        )

    everybody = ranks.gather(agree_among(ranks, find))
    node = [rank for rank, found in enumerate(everybody) if found.kernel == everybody[ranks.rank].kernel]
    places = _places([everybody[rank] for rank in node])

    def choose(config: Config) -> CoreShare:
        return choose_cores(
            places,
            node.index(ranks.rank),
            on_accelerator=not accelerator.steps_on_host,
            bind=config.bind_cores,
            cpu_threads=config.cpu_threads,
        )

    return choose


def _places(node: list[_Found]) -> list[RankPlace]:
    places = []
    for local_rank, found in enumerate(node):
        container = [other for other, mate in enumerate(node) if mate.host == found.host]
        quota = part_of_quota(found.quota, container.index(local_rank), len(container))
        places.append(RankPlace(cores=found.cores, quota=quota, gpu_node=found.gpu_node))
    return places
