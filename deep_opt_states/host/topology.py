"""Read the physical cores and their NUMA nodes, and the NUMA nodes of GPUs, from /sys."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deep_opt_states.host import machine


@dataclass(frozen=True, kw_only=True)
class Core:
    """A physical core."""

    cpus: tuple[int, ...]
    """Its logical CPUs (hyperthread siblings) that this process may use, in ascending order."""
    node: int | None
    """Its NUMA node; None if the kernel does not report it."""


def cores_of(
    allowed: Collection[int],
    cpus: Path = Path("/sys/devices/system/cpu"),
    nodes: Path = Path("/sys/devices/system/node"),
) -> tuple[Core, ...]:
    """Return the physical cores of the logical CPUs ``allowed``, in ascending order of their first CPU.

    If the kernel does not report the siblings of a CPU, as in some sandboxes, the CPU counts as a core of its own.
    """
    folders = {int(folder.name.removeprefix("node")): folder for folder in nodes.glob("node[0-9]*")}
    node_of = {cpu: node for node, folder in folders.items() for cpu in _list_in(folder / "cpulist")}
    found: dict[tuple[int, ...], Core] = {}
    for cpu in sorted(allowed):
        siblings = {cpu, *_list_in(cpus / f"cpu{cpu}/topology/thread_siblings_list")}
        usable = tuple(sorted(siblings.intersection(allowed)))
        found.setdefault(usable, Core(cpus=usable, node=node_of.get(cpu)))
    return tuple(found.values())


def gpu_node(devices: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """Return the NUMA node of the current GPU of this process; None if there is no GPU or its node is unknown."""
    if not machine.has_cuda():
        return None
    import torch

    # PyTorch's stubs do not have these attributes.
    gpu: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    return pci_node(gpu.pci_domain_id, gpu.pci_bus_id, gpu.pci_device_id, devices)


def pci_node(domain: int, bus: int, device: int, devices: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """Return the NUMA node of the PCI device; None if it is unknown."""
    try:
        node = int((devices / f"{domain:04x}:{bus:02x}:{device:02x}.0" / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    # The kernel reports -1 if the firmware does not define the node, as is common in virtual machines.
    return node if node >= 0 else None


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Parse the kernel's format of a list: ``"0-2,8"`` gives (0, 1, 2, 8). Raise ``ValueError`` for anything else."""
    cpus: list[int] = []
    for part in text.strip().split(",") if text.strip() else ():
        first, _, last = part.partition("-")
        cpus.extend(range(int(first), int(last or first) + 1))
    return tuple(cpus)


def format_cpu_list(cpus: Iterable[int]) -> str:
    """Format a list as the kernel does: (0, 1, 2, 8) gives ``"0-2,8"``."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and runs[-1][-1] == cpu - 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _list_in(file: Path) -> tuple[int, ...]:
    """Return the list in ``file``; empty if the kernel does not report it."""
    try:
        return parse_cpu_list(file.read_text())
    except (OSError, ValueError):
        return ()
