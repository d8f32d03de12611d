"""Which physical cores there are, and what is near them: the kernel's numbers, from /sys."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deep_opt_states.host import machine


@dataclass(frozen=True, kw_only=True)
class Core:
    """A physical core.

    ``cpus`` are its logical CPUs (hyperthread siblings), ascending, as far as this process may use them; ``node`` is
    its NUMA node, None where the kernel does not tell.
    """

    cpus: tuple[int, ...]
    node: int | None


def cores_of(
    allowed: Collection[int],
    cpus: Path = Path("/sys/devices/system/cpu"),
    nodes: Path = Path("/sys/devices/system/node"),
) -> tuple[Core, ...]:
    """The cores that the logical CPUs ``allowed`` are on, ascending by their first one.

    Where the kernel tells nothing of a CPU, as in some sandboxes, it is taken for a core of its own.
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
    """The NUMA node of the GPU that is current in this process; None where there is no GPU, or no telling."""
    if not machine.has_cuda():
        return None
    import torch

    # PyTorch's stubs do not have these attributes.
    gpu: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    return pci_node(gpu.pci_domain_id, gpu.pci_bus_id, gpu.pci_device_id, devices)


def pci_node(domain: int, bus: int, device: int, devices: Path = Path("/sys/bus/pci/devices")) -> int | None:
    try:
        node = int((devices / f"{domain:04x}:{bus:02x}:{device:02x}.0" / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    # The kernel says -1 where the firmware has not told it, which virtual machines' often has not.
    return node if node >= 0 else None


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """``"0-2,8"`` is (0, 1, 2, 8), as the kernel writes it; raises ``ValueError`` for anything else."""
    cpus: list[int] = []
    for part in text.strip().split(",") if text.strip() else ():
        first, _, last = part.partition("-")
        cpus.extend(range(int(first), int(last or first) + 1))
    return tuple(cpus)


def format_cpu_list(cpus: Iterable[int]) -> str:
    """(0, 1, 2, 8) is ``"0-2,8"``."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and runs[-1][-1] == cpu - 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _list_in(file: Path) -> tuple[int, ...]:
    """Empty where the kernel does not tell."""
    try:
        return parse_cpu_list(file.read_text())
    except (OSError, ValueError):
        return ()
