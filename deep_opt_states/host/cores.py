"""Which cores the CPU update of a rank runs on: a pure choice, from what all ranks of its node may use.

An update is as fast as host memory, and a second thread on a physical core loads no more of it: one thread a core. The
ranks of a node update at the same time, and the slowest decides when the step ends: every rank has cores of its own,
about as many as the others. And what a thread touches first lies in the memory of its NUMA node, from where the rank's
GPU copies it: the cores are near the GPU.

``OMP_NUM_THREADS`` is deliberately not consulted. torchrun sets it to 1 where the user has not set it, so that
PyTorch's operations of several ranks do not fight over cores: a 1 says nothing about the update. ``cpu_threads`` does.
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
"""A guess, not measured. Of many cores, fewer than all use up the bandwidth of host memory in an update."""

CORES_FOR_A_SECOND_LAUNCH_CORE = 4
"""The least number of cores of which two launch.

Backward keeps a core busy with autograd's thread, and forward with the main thread. NCCL's threads and the one that
pins batches run beside it: on a single core they delay launches, and the GPU idles in all of the step. Of 4 cores, the
second costs the CPU's part of the update at most a third of its speed, and the planner moves work to the GPU for that.
With fewer cores, it would be half of it, or all.
"""


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """What one rank may use.

    ``cores`` by its affinity; ``quota`` is its part of the cgroup's CPU time, in whole cores, None if unlimited;
    ``gpu_node`` is the NUMA node of its GPU, None if unknown.
    """

    cores: tuple[Core, ...]
    quota: int | None = None
    gpu_node: int | None = None

    def __post_init__(self) -> None:
        assert self.cores
        assert self.quota is None or self.quota >= 1

    @property
    def cpus(self) -> frozenset[int]:
        return frozenset(cpu for core in self.cores for cpu in core.cpus)

    @property
    def max_threads(self) -> int:
        return len(self.cpus) if self.quota is None else min(len(self.cpus), self.quota)


@dataclass(frozen=True, kw_only=True)
class CoreShare:
    """What one rank was given.

    ``threads`` update sub-groups, the i-th pinned to the logical CPU ``cores[i]``; all other threads of the process run
    on ``launch_cores``, logical CPUs too. Both are empty where nothing is bound. ``reason`` is for the log.
    """

    threads: int
    cores: tuple[int, ...] = ()
    launch_cores: tuple[int, ...] = ()
    reason: str

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
    """What one of ``ranks`` may use of the CPU time that a cgroup gives them all, in whole cores; at least 1."""
    if quota is None:
        return None
    each, more = divmod(int(quota), ranks)
    return max(1, each + (rank < more))


def choose_cores(
    ranks: Sequence[RankPlace],
    local_rank: int,
    *,
    on_accelerator: bool,
    bind: bool = True,
    cpu_threads: int | None = None,
) -> CoreShare:
    """For one of the ``ranks`` of a node, which are given by local rank; what the others choose is disjoint.

    Raises ``ConfigError`` for more ``cpu_threads`` than the rank may use CPUs.
    """
    me = ranks[local_rank]
    if cpu_threads is not None and cpu_threads > me.max_threads:
        raise _too_many(me, cpu_threads)
    # Who binds ranks (deepspeed --bind_cores_to_rank, torchrun --numa-binding) gives CPUs to one rank or to several.
    mates = [rank for rank, place in enumerate(ranks) if place.cpus == me.cpus]
    rivals = [rank for rank, place in enumerate(ranks) if place.cpus & me.cpus]
    own: tuple[Core, ...] = ()
    if len(rivals) > len(mates):
        not_bound = "the ranks' affinities overlap in part"
    elif len(me.cores) < len(mates):
        not_bound = f"{len(mates)} ranks share them"
    else:
        own = _own_cores(ranks, mates, local_rank)
        not_bound = _why_not_to_bind(own, on_accelerator, bind, cpu_threads)

    num_cores = len(own) or max(1, len(me.cores) // len(rivals))
    budget = num_cores if me.quota is None else min(num_cores, me.quota)
    threads = cpu_threads or budget - (_num_launch_cores(budget) if on_accelerator else 0)

    reasons = [f"{num_cores} of {len(me.cores)} physical cores"]
    if not not_bound and me.gpu_node is not None and {core.node for core in own} == {me.gpu_node}:
        reasons.append(f"on NUMA node {me.gpu_node} like its GPU")
    if budget < num_cores:
        reasons.append(f"of which the cgroup's limit leaves {budget}")
    if cpu_threads is not None:
        reasons.append('threads by "cpu_threads"')
    if not_bound:
        reasons.append(not_bound)
        return CoreShare(threads=threads, reason=", ".join(reasons))
    cores = _first_of_each_core(own)[:threads]
    return CoreShare(
        threads=threads, cores=cores, launch_cores=_launch_cores(own, frozenset(cores)), reason=", ".join(reasons)
    )


def _too_many(place: RankPlace, cpu_threads: int) -> ConfigError:
    limit = "none" if place.quota is None else f"{place.quota} for this rank"
    return ConfigError(
        f"{CONFIG_KEY}.cpu_threads: must be at most the {place.max_threads} CPUs that a rank may use "
        f"(affinity {len(place.cpus)}, cgroup limit {limit}), found {cpu_threads}.\n"
        f"Leave it out for one a physical core, or give the rank more CPUs (taskset, docker --cpus, "
        f"Slurm --cpus-per-task)."
    )


def _why_not_to_bind(own: tuple[Core, ...], on_accelerator: bool, bind: bool, cpu_threads: int | None) -> str:
    """Empty if nothing speaks against it."""
    if not on_accelerator:
        return "forward and backward run on them, too"
    if not bind:
        return '"bind_cores" is false'
    if cpu_threads is not None and cpu_threads > sum(len(core.cpus) for core in own):
        return "which are fewer"
    return ""


def _own_cores(ranks: Sequence[RankPlace], mates: list[int], local_rank: int) -> tuple[Core, ...]:
    if len(mates) == 1 < len(ranks):
        # Somebody chose these cores for this rank, also those that are far from its GPU.
        return ranks[local_rank].cores
    # One of them counts, should they see the machine differently.
    shares = _divide(ranks[mates[0]].cores, [ranks[mate].gpu_node for mate in mates])
    return shares[mates.index(local_rank)]


def _divide(cores: Sequence[Core], gpu_nodes: Sequence[int | None]) -> list[tuple[Core, ...]]:
    """Disjoint shares of ``cores``, at least one each, for GPUs on those nodes.

    The cores of a NUMA node go to the ranks whose GPU is there; unless the nodes are so unequal that a rank would have
    less than half of an even share, for which all would wait. Then, and where the nodes are unknown, even shares of
    all cores, by NUMA node as far as it goes.
    """
    cores_on: dict[int | None, list[Core]] = defaultdict(list)
    for core in cores:
        cores_on[core.node].append(core)
    ranks_at: dict[int | None, list[int]] = defaultdict(list)
    for rank, node in enumerate(gpu_nodes):
        ranks_at[node].append(rank)

    # A rank cannot have more than one node's cores near its GPU, so nodes without a GPU do not make it poor.
    even = len(cores) // max(len(gpu_nodes), len(cores_on))
    poorest = min(len(cores_on.get(node, ())) // len(ranks) for node, ranks in ranks_at.items())
    if poorest >= 1 and 2 * poorest >= even:
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
    """In order; the first parts have one more where it does not come out even."""
    size, more = divmod(len(cores), parts)
    cuts = [part * size + min(part, more) for part in range(parts + 1)]
    return [tuple(cores[start:end]) for start, end in pairwise(cuts)]


def _num_launch_cores(num_cores: int) -> int:
    if num_cores < 2:
        return 0
    least = 2 if num_cores >= CORES_FOR_A_SECOND_LAUNCH_CORE else 1
    return max(least, num_cores // CORES_PER_LAUNCH_CORE)


def _first_of_each_core(cores: Sequence[Core]) -> tuple[int, ...]:
    """Their logical CPUs; the siblings come last, for a user who asks for more threads than there are cores."""
    firsts = [core.cpus[0] for core in cores]
    return (*firsts, *(cpu for core in cores for cpu in core.cpus[1:]))


def _launch_cores(own: Sequence[Core], taken: frozenset[int]) -> tuple[int, ...]:
    """Cores that update nothing; or else the siblings of those that do; or else, with one core for all, that one."""
    free = [core for core in own if not taken.intersection(core.cpus)]
    everything = [cpu for core in own for cpu in core.cpus]
    chosen = (
        [cpu for core in free for cpu in core.cpus] or [cpu for cpu in everything if cpu not in taken] or everything
    )
    return tuple(sorted(chosen))
