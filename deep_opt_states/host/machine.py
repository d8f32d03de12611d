"""Describe the host and its GPU, and how much of the cores and the memory this process may use."""

from __future__ import annotations

import mmap
import platform
import re
import resource
import subprocess
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class HostMemory:
    """The smaller of the host's memory and the cgroup's limit, and the host's memory that is available now."""

    usable_bytes: int
    available_bytes: int


def memory() -> HostMemory:
    """Return the memory of the host and of this process's cgroup."""
    import psutil

    host = psutil.virtual_memory()
    limit_bytes = memory_limit_bytes(cgroup_folders("memory"))
    return HostMemory(host.total if limit_bytes is None else min(host.total, limit_bytes), host.available)


def process_bytes() -> int | None:
    """Return the bytes of host memory that this process uses now; None where Linux does not show them."""
    pages = _text(Path("/proc/self/statm")).split()
    return int(pages[1]) * mmap.PAGESIZE if pages else None


@dataclass(frozen=True, kw_only=True)
class Core:
    """A physical core: its logical CPUs that this process may use, in ascending order, and its NUMA node if known."""

    cpus: tuple[int, ...]
    node: int | None


def cores_of(
    allowed: Collection[int],
    cpus: Path = Path("/sys/devices/system/cpu"),
    nodes: Path = Path("/sys/devices/system/node"),
) -> tuple[Core, ...]:
    """Return the physical cores of the logical CPUs ``allowed``, in ascending order of their first CPU."""
    folders = nodes.glob("node[0-9]*")
    node_of = {cpu: int(folder.name[len("node") :]) for folder in folders for cpu in _list_in(folder / "cpulist")}
    found: dict[tuple[int, ...], Core] = {}
    for cpu in sorted(allowed):
        # Some sandboxes do not report siblings. A CPU is then a core of its own.
        siblings = {cpu, *_list_in(cpus / f"cpu{cpu}/topology/thread_siblings_list")}
        usable = tuple(sorted(siblings.intersection(allowed)))
        found.setdefault(usable, Core(cpus=usable, node=node_of.get(cpu)))
    return tuple(found.values())


def gpu_node(devices: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """Return the NUMA node of the current GPU of this process; None if there is no GPU or its node is unknown."""
    if (found := gpu()) is None:
        return None
    place = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    # The kernel reports -1 if the firmware does not define the node, as in many virtual machines.
    node = int(_text(devices / place / "numa_node") or -1)
    return node if node >= 0 else None


def _text(file: Path) -> str:
    """Return the text of a file of the kernel, empty if it is missing or a sandbox does not let this user read it."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _list_in(file: Path) -> tuple[int, ...]:
    """Return a list in the kernel's format: ``0-2,8`` gives (0, 1, 2, 8), and any other text gives ()."""
    cpus: list[int] = []
    try:
        for part in filter(None, _text(file).split(",")):
            first, _, last = part.partition("-")
            cpus.extend(range(int(first), int(last or first) + 1))
    except ValueError:
        return ()
    return tuple(cpus)


def kernel_id(boot_id: Path = Path("/proc/sys/kernel/random/boot_id")) -> str:
    """Return an identifier of the running kernel, the same in all its containers, or the host's name if it has none."""
    return _text(boot_id) or platform.node()


def memlock_limit_bytes() -> int | None:
    """Return how much memory this process may lock with mlock; None if unlimited."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def gpu() -> Any:
    """Return PyTorch's properties of the current GPU of this process; None if it finds none."""
    import torch

    return torch.cuda.get_device_properties(torch.cuda.current_device()) if has_cuda() else None


def driver_version(loaded: Path = Path("/sys/module/nvidia/version")) -> str:
    """Return the version of NVIDIA's driver; empty if there is none, or if it cannot be determined."""
    if version := _text(loaded):
        return version
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    return output.partition("\n")[0].strip()


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the model name of the CPU, or the architecture if the kernel does not report a name (as on ARM)."""
    names = re.findall(r"^model name\s*:\s*(.+)$", _text(cpuinfo), re.MULTILINE)
    return names[0].strip() if names else platform.machine()


def last_level_cache_bytes(cpus: Path = Path("/sys/devices/system/cpu")) -> int | None:
    """Return the size of all last-level caches, of which each counts once; None if the kernel does not report it."""
    caches: dict[int, dict[str, int]] = {}
    for folder in cpus.glob("cpu[0-9]*/cache/index[0-9]*"):
        try:
            level, shared, size = (_text(folder / name) for name in ("level", "shared_cpu_list", "size"))
            caches.setdefault(int(level), {})[shared] = int(size.removesuffix("K")) * 1024
        except ValueError:
            continue
    return sum(caches[max(caches)].values()) if caches else None


def cgroup_folders(
    controller: str, membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> Iterator[Path]:
    """Yield the folders of this process's cgroup and its ancestors, of version 2 and of version 1's ``controller``."""
    for line in _text(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / controller if controllers else root
        folder = top / path.lstrip("/")
        # Inside a container, the path may be the host's, of which only the top folder is mounted.
        yield from (level for level in (folder, *folder.parents) if level.is_relative_to(top))


def core_quota(folders: Iterable[Path]) -> float | None:
    """Return the smallest limit of CPU time of the cgroups in ``folders``, in cores; None if unlimited."""
    quotas = []
    for folder in folders:
        of_version_1 = (_text(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        quota, _, period = (_text(folder / "cpu.max") or " ".join(of_version_1)).partition(" ")
        if quota not in ("", "max", "-1"):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def memory_limit_bytes(folders: Iterable[Path]) -> int | None:
    """Return the smallest memory limit of the cgroups in ``folders``; None if unlimited."""
    return min((limit_bytes for _, limit_bytes in _memory_limits(folders)), default=None)


def memory_left_bytes(folders: Iterable[Path]) -> int | None:
    """Return the memory that the limits of the cgroups in ``folders`` leave free, each for its own use, or None."""
    return min((limit_bytes - _in_use_bytes(folder) for folder, limit_bytes in _memory_limits(folders)), default=None)


def _memory_limits(folders: Iterable[Path]) -> Iterator[tuple[Path, int]]:
    for folder in folders:
        for file in (folder / "memory.max", folder / "memory.limit_in_bytes"):
            limit = _text(file) or "max"
            # In version 1, the largest multiple of the page size means unlimited.
            if limit != "max" and int(limit) < 2**62:
                yield folder, int(limit)


def _in_use_bytes(folder: Path) -> int:
    """Return the memory in use without the file cache that can be reclaimed immediately; 0 if unknown."""
    for usage, cache in (("memory.current", "inactive_file"), ("memory.usage_in_bytes", "total_inactive_file")):
        if (used := _text(folder / usage)) and (found := _text(folder / "memory.stat")):
            reclaimable = {name: int(value) for name, value in map(str.split, found.splitlines())}.get(cache, 0)
            return int(used) - reclaimable
    return 0
