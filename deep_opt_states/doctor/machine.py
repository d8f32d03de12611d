"""The host: cores and memory, and how much of them this process may use."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from deep_opt_states.doctor.finding import Finding, Status


@dataclass(frozen=True)
class Cores:
    """``allowed`` by affinity; ``quota`` is the cgroup's share of CPU time, in cores, None if unlimited."""

    physical: int | None
    logical: int | None
    allowed: int
    quota: float | None

    @property
    def usable(self) -> int:
        return self.allowed if self.quota is None else max(1, min(self.allowed, int(self.quota)))


@dataclass(frozen=True)
class Memory:
    """``limit_bytes`` is the cgroup's, None if unlimited."""

    total_bytes: int
    available_bytes: int
    limit_bytes: int | None


def cores() -> Cores:
    import psutil

    quota = core_quota(cgroup_folders("cpu"))
    return Cores(psutil.cpu_count(logical=False), psutil.cpu_count(), len(os.sched_getaffinity(0)), quota)


def memory() -> Memory:
    import psutil

    host = psutil.virtual_memory()
    return Memory(host.total, host.available, memory_limit_bytes(cgroup_folders("memory")))


def memlock_limit_bytes() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def cgroup_folders(
    controller: str, membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> Iterator[Path]:
    """This process's cgroup and all above it, of version 2 and of the version 1 controller: all limits hold."""
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / controller if controllers else root
        folder = top / path.lstrip("/")
        # Inside a container the path may be the host's, of which only the top is mounted.
        yield from (level for level in (folder, *folder.parents) if level.is_relative_to(top) and level.is_dir())


def core_quota(folders: Iterable[Path]) -> float | None:
    quotas = []
    for folder in folders:
        if (folder / "cpu.max").is_file():
            quota, period = (folder / "cpu.max").read_text().split()
        elif (folder / "cpu.cfs_quota_us").is_file():
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        else:
            continue
        if quota not in ("max", "-1"):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def memory_limit_bytes(folders: Iterable[Path]) -> int | None:
    files = [folder / name for folder in folders for name in ("memory.max", "memory.limit_in_bytes")]
    limits = [file.read_text().strip() for file in files if file.is_file()]
    # Version 1 says "unlimited" with the largest multiple of the page size.
    return min((int(limit) for limit in limits if limit != "max" and int(limit) < 2**62), default=None)


def check_cores(found: Cores) -> Finding:
    quota = "no cgroup limit" if found.quota is None else f"cgroup limit {found.quota:g}"
    text = (
        f"{found.physical or 'unknown'} physical, {found.logical or 'unknown'} logical; "
        f"this process may use {found.usable} (affinity {found.allowed}, {quota})"
    )
    if found.usable == 1:
        remedy = (
            "Give it more (taskset, docker --cpus, Slurm --cpus-per-task): CPU Adam is as fast as its cores are many."
        )
        return Finding("cores", Status.WARN, text, remedy)
    return Finding("cores", Status.OK, text)


def check_omp(value: str | None, usable: int) -> Finding:
    topic = "OMP_NUM_THREADS"
    remedy = f"Set OMP_NUM_THREADS to the cores a rank has: {usable} here, divided by the ranks on this machine."
    if value is None:
        found = (
            "unset; torchrun then makes it 1, which puts CPU Adam on one core, and python uses all cores in each rank"
        )
        return Finding(topic, Status.WARN, found, remedy)
    threads = value.split(",")[0].strip()  # the first of a list is the outermost level, where CPU Adam runs
    if not threads.isdigit() or int(threads) == 0:
        return Finding(topic, Status.WARN, f"{value!r}; must be a positive integer", remedy)
    if int(threads) > usable:
        return Finding(topic, Status.WARN, f"{value}; must be at most the {usable} cores usable here", remedy)
    if int(threads) == 1 < usable:
        return Finding(topic, Status.WARN, f"1 of {usable} usable cores: CPU Adam runs on one core", remedy)
    return Finding(topic, Status.OK, f"{value} of {usable} usable cores")


def check_memory(found: Memory) -> Finding:
    limited = found.limit_bytes is not None and found.limit_bytes < found.total_bytes
    limit = f"container limit {_size(found.limit_bytes)}" if found.limit_bytes and limited else "no container limit"
    text = f"{_size(found.total_bytes)}, {_size(found.available_bytes)} available, {limit}"
    return Finding("host memory", Status.OK, text)


def check_memlock(limit_bytes: int | None, has_cuda: bool) -> Finding:
    topic = "memlock limit"
    if limit_bytes is None:
        return Finding(topic, Status.OK, "unlimited")
    if has_cuda:
        found = f"{_size(limit_bytes)}; should be unlimited where optimizer states are pinned"
        remedy = "ulimit -l unlimited, or docker run --ulimit memlock=-1, if pinning memory or starting NCCL fails."
        return Finding(topic, Status.WARN, found, remedy)
    return Finding(topic, Status.OK, f"{_size(limit_bytes)}; nothing is pinned without a GPU")


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.1f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:.1f} MB"
