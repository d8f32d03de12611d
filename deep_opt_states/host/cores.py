"""Choose the cores for a rank's CPU updates, and keep all other threads of the process off them.

Memory bandwidth limits an update, so each rank gets one thread per physical core, near its GPU where possible: first
touch places memory. The shares are disjoint and about equal, because all ranks wait for the slowest one.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path

import torch

from deep_opt_states.config import ConfigError
from deep_opt_states.host.machine import Core
from deep_opt_states.names import CONFIG_KEY

CORES_PER_LAUNCH_CORE = 8
"""An estimate, not measured: on large shares, fewer than all cores use the full bandwidth of host memory."""

CORES_FOR_A_SECOND_LAUNCH_CORE = 4
"""The smallest number of cores of which two are launch cores: one for autograd's thread, and one for NCCL's threads and
the one that pins batches, which would delay launches. Of fewer cores, the second one would slow CPU updates by half."""


def format_cpu_list(cpus: Iterable[int]) -> str:
    """Format a list as the kernel does: (0, 1, 2, 8) gives ``"0-2,8"``."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and runs[-1][-1] == cpu - 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """The physical cores that a rank may use, its CPU quota (None: unlimited), and its GPU's NUMA node if known."""

    cores: tuple[Core, ...]
    quota: int | None = None
    gpu_node: int | None = None

    @property
    def cpus(self) -> frozenset[int]:
        return frozenset(cpu for core in self.cores for cpu in core.cpus)


@dataclass(frozen=True, kw_only=True)
class CoreShare:
    """The threads of a rank that update, pinned to ``cores`` in order. All others run on ``launch_cores``."""

    threads: int
    cores: tuple[int, ...] = ()
    launch_cores: tuple[int, ...] = ()
    reason: str

    def __str__(self) -> str:
        threads = f"{self.threads} thread{'' if self.threads == 1 else 's'}"
        if not self.cores:
            return f"{threads}, not bound ({self.reason})"
        bound, others = format_cpu_list(self.cores), format_cpu_list(self.launch_cores)
        return f"{threads} on CPU {bound}, all others of the process on CPU {others} ({self.reason})"


def part_of_quota(quota: float | None, rank: int, ranks: int) -> int | None:
    """Return one rank's part of a cgroup's ``quota``, in whole cores and at least 1."""
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
    """Return the share of one of ``ranks`` of a node. Raise ``ConfigError`` for more ``cpu_threads`` than its CPUs."""
    place = ranks[local_rank]
    most = min(len(place.cpus), place.quota or len(place.cpus))
    if cpu_threads is not None and cpu_threads > most:
        limit = "none" if place.quota is None else f"{place.quota} for this rank"
        raise ConfigError(
            f"{CONFIG_KEY}.cpu_threads: must be at most the {most} CPUs that a rank may use "
            f"(affinity {len(place.cpus)}, cgroup limit {limit}), found {cpu_threads}.\n"
            f"Leave it out for the number that fits this machine, or give the rank more CPUs (taskset, docker --cpus, "
            f"Slurm --cpus-per-task)."
        )
    # A launcher that binds (deepspeed --bind_cores_to_rank, torchrun --numa-binding) may give CPUs to several ranks.
    same = [rank for rank, other in enumerate(ranks) if other.cpus == place.cpus]
    num_overlapping = sum(not other.cpus.isdisjoint(place.cpus) for other in ranks)
    own: tuple[Core, ...] = ()
    not_bound = ""
    if num_overlapping > len(same):
        not_bound = "the ranks' affinities overlap in part"
    elif len(place.cores) < len(same):
        not_bound = f"{len(same)} ranks share them"
    elif len(same) == 1 < len(ranks):
        # The launcher bound this rank alone. Use all of its cores, even those that are far from its GPU.
        own = place.cores
    else:
        # Use the cores of the first rank for all of them, in case the ranks see the machine differently.
        own = _divide(ranks[same[0]].cores, [ranks[rank].gpu_node for rank in same])[same.index(local_rank)]
    if own and not on_accelerator:
        not_bound = "forward and backward also run on them"
    elif own and not bind:
        not_bound = '"bind_cores" is false'
    elif own and (cpu_threads or 0) > sum(len(core.cpus) for core in own):
        not_bound = "more threads than they have CPUs"

    num_cores = len(own) or max(1, len(place.cores) // num_overlapping)
    budget = num_cores if place.quota is None else min(num_cores, place.quota)
    threads = cpu_threads or budget - (_num_launch_cores(budget) if on_accelerator else 0)

    reasons = [f"{num_cores} of {len(place.cores)} physical cores"]
    if not not_bound and place.gpu_node is not None and {core.node for core in own} == {place.gpu_node}:
        reasons.append(f"on NUMA node {place.gpu_node} like its GPU")
    if budget < num_cores:
        reasons.append(f"of which the cgroup's limit allows {budget}")
    if cpu_threads is not None:
        reasons.append('number of threads set by "cpu_threads"')
    if not_bound:
        return CoreShare(threads=threads, reason=", ".join([*reasons, not_bound]))
    # Siblings come last: they are used only if the user sets more threads than cores.
    in_order = [core.cpus[0] for core in own] + [cpu for core in own for cpu in core.cpus[1:]]
    cores = tuple(in_order[:threads])
    free = [cpu for core in own if not set(cores).intersection(core.cpus) for cpu in core.cpus]
    launch_cores = tuple(sorted(free or in_order[threads:] or in_order))
    return CoreShare(threads=threads, cores=cores, launch_cores=launch_cores, reason=", ".join(reasons))


def _divide(cores: Sequence[Core], gpu_nodes: Sequence[int | None]) -> list[tuple[Core, ...]]:
    """Return disjoint shares of ``cores``, with at least one core each, for ranks whose GPUs are on ``gpu_nodes``."""
    cores_on: dict[int | None, list[Core]] = defaultdict(list)
    for core in sorted(cores, key=lambda core: (core.node is None, core.node or 0)):
        cores_on[core.node].append(core)
    ranks_at: dict[int | None, list[int]] = defaultdict(list)
    for rank in sorted(range(len(gpu_nodes)), key=lambda rank: (gpu_nodes[rank] is None, gpu_nodes[rank] or 0)):
        ranks_at[gpu_nodes[rank]].append(rank)
    groups = [(ranks, cores_on.get(node, [])) for node, ranks in ranks_at.items()]

    # The ranks whose GPU is on a node divide its cores, unless one of them would get less than half of an even share:
    # all ranks would wait for it. NUMA nodes without a GPU do not count for that.
    even_share = len(cores) // max(len(gpu_nodes), len(cores_on))
    smallest_share = min(len(near) // len(ranks) for ranks, near in groups)
    if smallest_share < 1 or 2 * smallest_share < even_share:
        groups = [([*chain(*ranks_at.values())], [*chain(*cores_on.values())])]
    shares: dict[int, tuple[Core, ...]] = {}
    for ranks, common in groups:
        # The first ranks have one more core if the parts cannot be equal.
        size, remainder = divmod(len(common), len(ranks))
        cuts = [place * size + min(place, remainder) for place in range(len(ranks) + 1)]
        shares |= {rank: tuple(common[start:end]) for rank, (start, end) in zip(ranks, pairwise(cuts), strict=True)}
    return [shares[rank] for rank in range(len(gpu_nodes))]


def _num_launch_cores(num_cores: int) -> int:
    if num_cores < 2:
        return 0
    least = 2 if num_cores >= CORES_FOR_A_SECOND_LAUNCH_CORE else 1
    return max(least, num_cores // CORES_PER_LAUNCH_CORE)


class AffinityError(RuntimeError):
    """The error for a system that does not let this process choose the CPUs of its threads."""


@dataclass
class _Process:
    """The bindings of this process, the latest of which applies, and the CPUs of each moved thread before and now."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    bindings: list[LaunchBinding] = field(default_factory=list)
    moved: dict[int, tuple[frozenset[int], frozenset[int]]] = field(default_factory=dict)
    torch_threads_before: int | None = None

    def moved_by_cpus(self, main_thread: int) -> dict[frozenset[int], tuple[frozenset[int], frozenset[int]]]:
        """Return one moved thread for each set of CPUs, preferably the main thread."""
        threads = [*self.moved.values(), *filter(None, [self.moved.get(main_thread)])]
        return {now: (before, now) for before, now in threads}

    def apply(self) -> None:
        """Move all threads to the CPUs of the latest binding, or back to their own if there is none."""
        target = self.bindings[-1].cpus if self.bindings else None
        first = target is not None and not self.moved
        # A later thread has inherited its affinity and is moved, or has bound itself and is not.
        inherited = self.moved_by_cpus(os.getpid())
        seen: set[int] = set()
        # A thread that is not moved yet can start another one, so repeat until there is no new one.
        while unseen := (alive := {int(task.name) for task in Path("/proc/self/task").iterdir()}) - seen:
            for thread in sorted(unseen):
                with suppress(ProcessLookupError):  # the thread has ended
                    found = frozenset(os.sched_getaffinity(thread))
                    moved = self.moved.get(thread) or inherited.get(found) or ((found, found) if first else None)
                    if moved is not None and found == moved[1]:
                        before = moved[0]
                        now = before if target is None else before & target or target
                        os.sched_setaffinity(thread, now)
                        self.moved[thread] = before, now
            seen |= unseen
        # The id of a thread that has ended may become another's, which has bound itself.
        self.moved = {thread: cpus for thread, cpus in self.moved.items() if thread in alive}
        # More intra-op threads of PyTorch than CPUs would wait for each other.
        threads = self.torch_threads_before = self.torch_threads_before or torch.get_num_threads()
        if target is None:
            self.moved.clear()
            self.torch_threads_before = None
        else:
            threads = min(threads, len(target))
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)


_process = _Process()


class LaunchBinding:
    """A restriction of all threads of this process to the logical CPUs ``cpus``, until ``release()``.

    A thread that was already bound stays on its CPUs in ``cpus``. Later threads and other programs inherit the
    affinity. A forked child, which may load data and slow down launches, gets its parent's CPUs. If threads cannot be
    moved, the constructor restores everything and raises ``AffinityError``.
    """

    def __init__(self, cpus: Collection[int]) -> None:
        assert cpus
        self.cpus = frozenset(cpus)
        with _process.lock:
            _process.bindings.append(self)
            try:
                _process.apply()
            except OSError as error:
                _process.bindings.remove(self)
                _process.apply()
                raise AffinityError(
                    f"A process must be able to choose the CPUs of its threads; choosing {sorted(self.cpus)}, "
                    f'found {error}.\nSet "bind_cores": false.'
                ) from error

    def release(self) -> None:
        """Remove the restriction, so that the binding before it applies again."""
        with _process.lock:
            if self in _process.bindings:
                _process.bindings.remove(self)
                _process.apply()


def allowed_cpus() -> frozenset[int]:
    """Return the logical CPUs that this process may use, including those that a binding keeps its threads off."""
    with _process.lock:
        moved = _process.moved.get(os.getpid())
        return moved[0] if moved else frozenset(os.sched_getaffinity(os.getpid()))


def _restore_in_forked_child() -> None:
    """Give the only thread of a forked child the CPUs that the forking thread had before it was moved."""
    global _process
    # The lock may be held by a thread that does not exist in the child. The recorded thread ids are the parent's.
    parent, _process = _process, _Process()
    moved = parent.moved_by_cpus(os.getppid()).get(frozenset(os.sched_getaffinity(0)))
    if moved is not None:
        # If the container has lost these CPUs, the child keeps its affinity.
        with suppress(OSError):
            os.sched_setaffinity(0, moved[0])


os.register_at_fork(after_in_child=_restore_in_forked_child)
