"""Test how facts about the host are read from files that the Linux kernel writes."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from deep_opt_states.host import machine


def test_each_last_level_cache_is_counted_once(tmp_path: Path) -> None:
    for cpu in range(4):
        for index, (level, size, shared) in enumerate(
            [(1, "32K", str(cpu)), (3, "2048K", "0-1" if cpu < 2 else "2-3")]
        ):
            folder = tmp_path / f"cpu{cpu}/cache/index{index}"
            folder.mkdir(parents=True)
            for name, text in {"level": str(level), "size": size, "shared_cpu_list": shared}.items():
                (folder / name).write_text(f"{text}\n")
    (tmp_path / "cpu3/cache/index1/size").write_text("no size\n")
    assert machine.last_level_cache_bytes(tmp_path) == 2 * 2048 * 1024
    (tmp_path / "cpu2/cache/index1/size").unlink()
    assert machine.last_level_cache_bytes(tmp_path) == 2048 * 1024
    assert machine.last_level_cache_bytes(tmp_path / "nothing") is None


def test_the_name_of_the_cpu_is_read_from_cpuinfo(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nmodel name\t: AMD EPYC 9654 96-Core Processor\nmodel\t: 17\n")
    assert machine.cpu_name(file) == "AMD EPYC 9654 96-Core Processor"
    assert machine.cpu_name(tmp_path / "nothing") == platform.machine()


def test_the_version_of_the_driver_is_read_from_sysfs_or_nvidia_smi(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "version"
    file.write_text("550.54.15\n")
    assert machine.driver_version(file) == "550.54.15"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.driver_version(tmp_path / "nothing") == ""
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 535.129.03\necho 535.129.03\n")
    smi.chmod(0o755)
    assert machine.driver_version(tmp_path / "nothing") == "535.129.03"


@pytest.mark.parametrize(("limit", "usable"), [(None, 100), (60, 60), (2**60, 100)])
def test_usable_memory_is_what_the_cgroup_leaves(limit: int | None, usable: int) -> None:
    assert machine.HostMemory(total_bytes=100, available_bytes=50, limit_bytes=limit).usable_bytes == usable


VERSIONS = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", 2**63 - 4096),
    2: ("memory.max", "memory.current", "inactive_file", "max"),
}


def write_cgroup(folder: Path, version: int, limit: int | None, usage: int, cache: int = 0) -> Path:
    limit_file, usage_file, cache_name, unlimited = VERSIONS[version]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / limit_file).write_text(f"{unlimited if limit is None else limit}\n")
    (folder / usage_file).write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{cache_name} {cache}\n")
    return folder


@pytest.mark.parametrize("version", VERSIONS)
def test_each_memory_limit_is_compared_with_the_usage_of_its_own_group(tmp_path: Path, version: int) -> None:
    top = write_cgroup(tmp_path, version, None, 900)
    job = write_cgroup(tmp_path / "job", version, 100, 95)
    step = write_cgroup(tmp_path / "job/step", version, None, 1)
    assert machine.memory_left_bytes([step, job, top]) == 5, "the job's other tasks use the rest"
    write_cgroup(step, version, 40, 38)
    assert machine.memory_left_bytes([step, job, top]) == 2, "the limit of the step is lower than that of the job"
    assert machine.memory_limit_bytes([step, job, top]) == 40
    assert machine.memory_left_bytes([top]) is None


def test_the_lower_limit_of_both_cgroup_versions_applies(tmp_path: Path) -> None:
    folders = [write_cgroup(tmp_path / "1", 1, 60, 10), write_cgroup(tmp_path / "2", 2, 100, 70)]
    assert machine.memory_left_bytes(folders) == machine.memory_left_bytes(folders[::-1]) == 30


@pytest.mark.parametrize("version", VERSIONS)
def test_reclaimable_file_cache_counts_as_free(tmp_path: Path, version: int) -> None:
    assert machine.memory_left_bytes([write_cgroup(tmp_path, version, 1000, 900, cache=300)]) == 400
    (tmp_path / "memory.stat").unlink()
    assert machine.memory_left_bytes([tmp_path, tmp_path / "nothing"]) == 1000
