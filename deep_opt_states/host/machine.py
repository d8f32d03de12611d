"""Facts about the host and its GPU, and how much of them this process may use."""

from __future__ import annotations

import os
import platform
import re
import resource
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path


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

    @property
    def usable_bytes(self) -> int:
        return self.total_bytes if self.limit_bytes is None else min(self.total_bytes, self.limit_bytes)


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_bytes: int


def cores() -> Cores:
    import psutil

    quota = core_quota(cgroup_folders("cpu"))
    return Cores(psutil.cpu_count(logical=False), psutil.cpu_count(), len(os.sched_getaffinity(0)), quota)


def memory() -> Memory:
    import psutil

    host = psutil.virtual_memory()
    return Memory(host.total, host.available, memory_limit_bytes(cgroup_folders("memory")))


def kernel_id(boot_id: Path = Path("/proc/sys/kernel/random/boot_id")) -> str:
    """The same in all containers on one running kernel, which number its CPUs alike; or the host's name."""
    try:
        return boot_id.read_text().strip()
    except OSError:
        return platform.node()


def memlock_limit_bytes() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def gpu() -> Gpu | None:
    """The GPU that is current in this process; None where PyTorch sees none."""
    if not has_cuda():
        return None
    import torch

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Gpu(properties.name, properties.total_memory)


def driver_version(loaded: Path = Path("/sys/module/nvidia/version")) -> str:
    """NVIDIA's driver; empty where there is none, or none that can be asked."""
    try:
        return loaded.read_text().strip()
    except OSError:
        pass
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    return said.splitlines()[0].strip() if said else ""


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The model's name, or the architecture's where the kernel does not know it (as on ARM)."""
    names = re.findall(r"^model name\s*:\s*(.+)$", cpuinfo.read_text() if cpuinfo.is_file() else "", re.MULTILINE)
    return names[0].strip() if names else platform.machine()


def last_level_cache_bytes(cpus: Path = Path("/sys/devices/system/cpu")) -> int | None:
    """Of all cores together, each cache once however many cores share it; None where the kernel does not tell."""
    caches: dict[int, dict[str, int]] = {}
    for folder in cpus.glob("cpu[0-9]*/cache/index[0-9]*"):
        try:
            level, shared, size = ((folder / name).read_text().strip() for name in ("level", "shared_cpu_list", "size"))
            caches.setdefault(int(level), {})[shared] = int(size.removesuffix("K")) * 1024
        except (OSError, ValueError):
            continue
    return sum(caches[max(caches)].values()) if caches else None


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
    return min((limit_bytes for _, limit_bytes in _memory_limits(folders)), default=None)


def memory_left_bytes(folders: Iterable[Path]) -> int | None:
    """By the limit that leaves least, None without limits: what else a job runs counts for the job's, not for ours."""
    return min((limit_bytes - _in_use_bytes(folder) for folder, limit_bytes in _memory_limits(folders)), default=None)


def _memory_limits(folders: Iterable[Path]) -> Iterator[tuple[Path, int]]:
    for folder in folders:
        for file in (folder / "memory.max", folder / "memory.limit_in_bytes"):
            limit = file.read_text().strip() if file.is_file() else "max"
            # Version 1 says "unlimited" with the largest multiple of the page size.
            if limit != "max" and int(limit) < 2**62:
                yield folder, int(limit)


def _in_use_bytes(folder: Path) -> int:
    """Without the file cache that it can give back at once; 0 where the folder does not tell."""
    for usage, cache in (("memory.current", "inactive_file"), ("memory.usage_in_bytes", "total_inactive_file")):
        if (folder / usage).is_file() and (folder / "memory.stat").is_file():
            pairs = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
            reclaimable = {name: int(value) for name, value in pairs}.get(cache, 0)
            return int((folder / usage).read_text()) - reclaimable
    return 0
