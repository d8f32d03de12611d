"""Test how cores and NUMA nodes are read from files in the formats of the kernel."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deep_opt_states.host import machine
from deep_opt_states.host.cores import format_cpu_list
from deep_opt_states.host.machine import Core, cores_of, gpu_node, parse_cpu_list


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


@pytest.fixture
def system(tmp_path: Path) -> tuple[Path, Path]:
    """Write the files of two sockets with two cores of two threads each, numbered by first threads first as usual."""
    cpus, nodes = tmp_path / "cpu", tmp_path / "node"
    for cpu in range(8):
        write(cpus / f"cpu{cpu}/topology/thread_siblings_list", f"{cpu % 4},{cpu % 4 + 4}")
    write(nodes / "node0/cpulist", "0-1,4-5")
    write(nodes / "node1/cpulist", "2-3,6-7")
    # A node with memory only, such as that of a GPU whose memory the CPU can address.
    write(nodes / "node2/cpulist", "")
    write(nodes / "online", "0-2")
    return cpus, nodes


def test_hyperthread_siblings_are_one_core(system: tuple[Path, Path]) -> None:
    assert cores_of(range(8), *system) == (
        Core(cpus=(0, 4), node=0),
        Core(cpus=(1, 5), node=0),
        Core(cpus=(2, 6), node=1),
        Core(cpus=(3, 7), node=1),
    )


def test_cores_have_only_the_cpus_that_are_allowed(system: tuple[Path, Path]) -> None:
    assert cores_of({7, 1, 6, 2}, *system) == (
        Core(cpus=(1,), node=0),
        Core(cpus=(2, 6), node=1),
        Core(cpus=(7,), node=1),
    )


def test_each_cpu_is_a_core_if_the_kernel_reports_no_siblings(tmp_path: Path) -> None:
    write(tmp_path / "cpu/cpu3/topology/thread_siblings_list", "no list")
    expected = (Core(cpus=(2,), node=None), Core(cpus=(3,), node=None))
    assert cores_of({2, 3}, tmp_path / "cpu", tmp_path / "node") == expected


def test_this_machine_has_as_many_physical_cores_as_psutil_says() -> None:
    physical, logical = psutil.cpu_count(logical=False), psutil.cpu_count()
    assert logical is not None
    if physical is not None:
        assert len(cores_of(range(logical))) == physical


@pytest.mark.parametrize(("text", "node"), [("1", 1), ("0", 0), ("-1", None), ("", None), (None, None)])
def test_the_numa_node_of_a_gpu_is_read(
    text: str | None, node: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if text is not None:
        write(tmp_path / "0001:3b:00.0/numa_node", text)
    properties = SimpleNamespace(pci_domain_id=1, pci_bus_id=0x3B, pci_device_id=0)
    monkeypatch.setattr(machine, "has_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", {3: properties}.__getitem__)
    assert gpu_node(tmp_path) == node


def test_there_is_no_numa_node_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "has_cuda", lambda: False)
    assert gpu_node() is None


def test_a_kernel_is_identified_by_its_boot_id(tmp_path: Path) -> None:
    write(tmp_path / "boot_id", "bbeee42d-708f-4d03-92c4-525c00724ede")
    assert machine.kernel_id(tmp_path / "boot_id") == "bbeee42d-708f-4d03-92c4-525c00724ede"
    assert machine.kernel_id(tmp_path / "nothing") == machine.platform.node()


def test_cpu_lists_are_parsed_and_formatted_as_by_the_kernel() -> None:
    assert parse_cpu_list("0-2,8,10-11\n") == (0, 1, 2, 8, 10, 11)
    assert parse_cpu_list("\n") == ()
    assert format_cpu_list((8, 2, 0, 1)) == "0-2,8"


@given(st.sets(st.integers(0, 300)))
def test_a_formatted_cpu_list_parses_to_the_same_cpus(cpus: set[int]) -> None:
    assert parse_cpu_list(format_cpu_list(cpus)) == tuple(sorted(cpus))
