"""Choose the cores for a rank's CPU updates, as a pure function of the cores that all ranks of its node may use.

Each rank gets:

- One thread per physical core: the update is limited by the bandwidth of host memory, and a second thread on the same
  core adds none.
- Cores of its own, about as many as every other rank: the ranks of a node update at the same time, and
  the slowest one determines when the step ends.
- Cores near the rank's GPU: first touch places memory on the NUMA node of the touching thread, and the GPU copies it
  from there.

``OMP_NUM_THREADS`` is deliberately not used. torchrun sets it to 1 if the user has not set it, so that PyTorch's
operations in several ranks do not compete for cores. A value of 1 has no meaning for the update: ``cpu_threads`` sets
its threads.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from deep_opt_states.config import ConfigError
from deep_opt_states.host.topology import Core, format_cpu_list
from deep_opt_states.names import CONFIG_KEY

CORES_PER_LAUNCH_CORE = 8
"""The number of cores per launch core on large shares. It is an estimate, not measured.

With many cores, fewer than all of them already use the full bandwidth of host memory in an update.
"""

CORES_FOR_A_SECOND_LAUNCH_CORE = 4
"""The smallest number of cores of which two are launch cores.

Backward keeps one core busy with autograd's thread, and forward with the main thread. NCCL's threads and the thread
that pins batches run concurrently. On a single core they delay launches, so that the GPU idles throughout the step.
With 4 cores, the second launch core reduces the speed of the CPU's updates by at most a third, and the planner
compensates for that by moving work to the GPU. With fewer cores, it would reduce the speed by half or more.
"""


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """The CPU resources that one rank may use."""

    cores: tuple[Core, ...]
    """The physical cores that its affinity allows."""
    quota: int | None = None
    """Its part of the CPU time that the cgroup allows, in whole cores; None if unlimited."""
    gpu_node: int | None = None
    """The NUMA node of its GPU; None if unknown."""

    def __post_init__(self) -> None:
        assert self.cores
        assert self.quota is None or self.quota >= 1

    @property
    def cpus(self) -> frozenset[int]:
        """Return the logical CPUs of all its cores."""
        return frozenset(cpu for core in self.cores for cpu in core.cpus)

    @property
    def max_threads(self) -> int:
        """Return how many threads can run at the same time."""
        return len(self.cpus) if self.quota is None else min(len(self.cpus), self.quota)


@dataclass(frozen=True, kw_only=True)
class CoreShare:
    """The threads and cores that one rank uses."""

    threads: int
    """The number of threads that update sub-groups."""
    cores: tuple[int, ...] = ()
    """The logical CPUs to which these threads are pinned, in order. Empty if nothing is bound."""
    launch_cores: tuple[int, ...] = ()
    """The logical CPUs for all other threads of the process. Empty if nothing is bound."""
    reason: str
    """The reason for this choice, for the log."""

    def __post_init__(self) -> None:
        assert self.threads >= 1
        assert len(self.cores) in (0, self.threads)
        assert bool(self.cores) == bool(self.launch_cores)

    def __str__(self) -> str:
        threads = f"{self.threads} thread{'' if self.threads == 1 else 's'}"
        if not self.cores:
            return f"{threads}, not bound ({self.reason})"
        bound, others = format_cpu_list(self.cores), format_cpu_list(self.launch_cores)
        return f"{threads} on CPU {bound}, all others of the process on CPU {others} ({self.reason})"


def part_of_quota(quota: float | None, rank: int, ranks: int) -> int | None:
    """Return the part of a cgroup's ``quota`` that one of ``ranks`` may use, in whole cores; at least 1."""
    if quota is None:
        return None
    each, remainder = divmod(int(quota), ranks)
    return max(1, each + (rank < remainder))


def choose_cores(
    ranks: Sequence[RankPlace],
    local_rank: int,
    *,
    on_accelerator: bool,
    bind: bool = True,
    cpu_threads: int | None = None,
) -> CoreShare:
    """Return the share of one rank. The shares of all ``ranks`` of a node, in the order of local ranks, are disjoint.

    ``on_accelerator`` is whether the model computes on an accelerator other than the CPU. ``bind`` and ``cpu_threads``
    are the config's. Raise ``ConfigError`` if ``cpu_threads`` exceeds the number of CPUs that the rank may use.
    """
    own_place = ranks[local_rank]
    if cpu_threads is not None and cpu_threads > own_place.max_threads:
        raise _too_many(own_place, cpu_threads)
    # Launchers that bind (deepspeed --bind_cores_to_rank, torchrun --numa-binding) assign CPUs to one or more ranks.
    same_affinity = [rank for rank, place in enumerate(ranks) if place.cpus == own_place.cpus]
    overlapping = [rank for rank, place in enumerate(ranks) if place.cpus & own_place.cpus]
    own_cores: tuple[Core, ...] = ()
    if len(overlapping) > len(same_affinity):
        not_bound = "the ranks' affinities overlap in part"
    elif len(own_place.cores) < len(same_affinity):
        not_bound = f"{len(same_affinity)} ranks share them"
    else:
        own_cores = _own_cores(ranks, same_affinity, local_rank)
        not_bound = _why_not_to_bind(own_cores, on_accelerator, bind, cpu_threads)

    num_cores = len(own_cores) or max(1, len(own_place.cores) // len(overlapping))
    budget = num_cores if own_place.quota is None else min(num_cores, own_place.quota)
    threads = cpu_threads or budget - (_num_launch_cores(budget) if on_accelerator else 0)

    reasons = [f"{num_cores} of {len(own_place.cores)} physical cores"]
    if not not_bound and own_place.gpu_node is not None and {core.node for core in own_cores} == {own_place.gpu_node}:
        reasons.append(f"on NUMA node {own_place.gpu_node} like its GPU")
    if budget < num_cores:
        reasons.append(f"of which the cgroup's limit allows {budget}")
    if cpu_threads is not None:
        reasons.append('number of threads set by "cpu_threads"')
    if not_bound:
        reasons.append(not_bound)
        return CoreShare(threads=threads, reason=", ".join(reasons))
    cores = _first_of_each_core(own_cores)[:threads]
    return CoreShare(
        threads=threads, cores=cores, launch_cores=_launch_cores(own_cores, frozenset(cores)), reason=", ".join(reasons)
    )


def _too_many(place: RankPlace, cpu_threads: int) -> ConfigError:
    limit = "none" if place.quota is None else f"{place.quota} for this rank"
    return ConfigError(
        f"{CONFIG_KEY}.cpu_threads: must be at most the {place.max_threads} CPUs that a rank may use "
        f"(affinity {len(place.cpus)}, cgroup limit {limit}), found {cpu_threads}.\n"
        f"Leave it out for the number that fits this machine, or give the rank more CPUs (taskset, docker --cpus, "
        f"Slurm --cpus-per-task)."
    )


def _why_not_to_bind(own_cores: tuple[Core, ...], on_accelerator: bool, bind: bool, cpu_threads: int | None) -> str:
    """Return the reason not to bind threads; empty if there is none."""
    if not on_accelerator:
        return "forward and backward run on them, too"
    if not bind:
        return '"bind_cores" is false'
    if cpu_threads is not None and cpu_threads > sum(len(core.cpus) for core in own_cores):
        return "more threads than they have CPUs"
    return ""


def _own_cores(ranks: Sequence[RankPlace], same_affinity: list[int], local_rank: int) -> tuple[Core, ...]:
    if len(same_affinity) == 1 < len(ranks):
        # The launcher bound this rank to cores of its own. Use all of them, even those that are far from its GPU.
        return ranks[local_rank].cores
    # Use the cores of the first rank for all of them, in case the ranks see the machine differently.
    shares = _divide(ranks[same_affinity[0]].cores, [ranks[rank].gpu_node for rank in same_affinity])
    return shares[same_affinity.index(local_rank)]


def _divide(cores: Sequence[Core], gpu_nodes: Sequence[int | None]) -> list[tuple[Core, ...]]:
    """Return disjoint shares of ``cores``, with at least one core each, for ranks whose GPUs are on ``gpu_nodes``.

    The cores of a NUMA node are divided among the ranks whose GPU is on that node. But if the nodes are so unequal that
    a rank would have less than half of an even share, all ranks would wait for that rank. Then, and if the nodes are
    unknown, all cores are divided evenly, as far as possible by NUMA node.
    """
    cores_on: dict[int | None, list[Core]] = defaultdict(list)
    for core in cores:
        cores_on[core.node].append(core)
    ranks_at: dict[int | None, list[int]] = defaultdict(list)
    for rank, node in enumerate(gpu_nodes):
        ranks_at[node].append(rank)

    # NUMA nodes without a GPU do not count against a rank's fair share: a rank has at most one node's cores near its
    # GPU.
    even_share = len(cores) // max(len(gpu_nodes), len(cores_on))
    smallest_share = min(len(cores_on.get(node, ())) // len(ranks) for node, ranks in ranks_at.items())
    if smallest_share >= 1 and 2 * smallest_share >= even_share:
        groups = [(ranks, cores_on[node]) for node, ranks in ranks_at.items()]
    else:
        in_order = [rank for node in sorted(ranks_at, key=_unknown_last) for rank in ranks_at[node]]
        groups = [(in_order, sorted(cores, key=lambda core: _unknown_last(core.node)))]
    shares: dict[int, tuple[Core, ...]] = {}
    for ranks, common in groups:
        shares.update(zip(ranks, _split(common, len(ranks)), strict=True))
    return [shares[rank] for rank in range(len(gpu_nodes))]


def _unknown_last(node: int | None) -> tuple[bool, int]:
    return node is None, node or 0


def _split(cores: Sequence[Core], parts: int) -> list[tuple[Core, ...]]:
    """Split ``cores`` into consecutive parts. The first parts have one more core if they cannot be equal."""
    size, remainder = divmod(len(cores), parts)
    cuts = [part * size + min(part, remainder) for part in range(parts + 1)]
    return [tuple(cores[start:end]) for start, end in pairwise(cuts)]


def _num_launch_cores(num_cores: int) -> int:
    """Return how many of a rank's ``num_cores`` cores are for the threads that do not update."""
    if num_cores < 2:
        return 0
    least = 2 if num_cores >= CORES_FOR_A_SECOND_LAUNCH_CORE else 1
    return max(least, num_cores // CORES_PER_LAUNCH_CORE)


def _first_of_each_core(cores: Sequence[Core]) -> tuple[int, ...]:
    """Return all logical CPUs of ``cores``, the first one of each core before their hyperthread siblings.

    The siblings are used only if the user sets more threads than there are cores.
    """
    firsts = [core.cpus[0] for core in cores]
    return (*firsts, *(cpu for core in cores for cpu in core.cpus[1:]))


def _launch_cores(own_cores: Sequence[Core], taken: frozenset[int]) -> tuple[int, ...]:
    """Return the logical CPUs for all other threads: the cores on which no update runs.

    If there are none, return the hyperthread siblings of the CPUs in ``taken``, and if there are none, all CPUs.
    """
    free = [core for core in own_cores if not taken.intersection(core.cpus)]
    everything = [cpu for core in own_cores for cpu in core.cpus]
    chosen = (
        [cpu for core in free for cpu in core.cpus] or [cpu for cpu in everything if cpu not in taken] or everything
    )
    return tuple(sorted(chosen))
