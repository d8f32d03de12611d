"""Test the cache of quick profiles, which never makes a run fail, and the facts about the host that it compares."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed

from deep_opt_states.device.kernels.adam import AdamKernel
from deep_opt_states.host import machine
from deep_opt_states.profiler import cache
from deep_opt_states.profiler.cache import quick_profile
from deep_opt_states.profiler.profile import (
    BY_PROFILE_ALONE,
    NO_ACCELERATOR,
    ProbeEffort,
    noise_waivers,
    training_cpu_adam,
)
from deep_opt_states.profiler.ranks import Ranks, launched_ranks
from perf_model.prediction.hardware import REQUIRED, HardwareProfile, Measurement, ProfileError, Provenance
from tests.model.profiles import profile
from tests.profiler.virtual import SMALL, kernels
from tests.ranks import on_ranks


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "deep_opt_states"


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the list of the rates that were measured: the n-th one is 1e9 + n."""
    rates: list[float] = []

    def measure(device: Any, ranks: Ranks, effort: Any, **kernels: Any) -> HardwareProfile:
        rates.append(1e9 + len(rates) + 1)
        return HardwareProfile(
            name="here",
            provenance=Provenance(source="measured", date="2026-01-02"),
            measurements={name: Measurement(samples=(rates[-1],)) for name in REQUIRED},
        )

    monkeypatch.setattr(cache, "measure", measure)
    return rates


def profile_and_log() -> tuple[float, list[str]]:
    log: list[str] = []
    return quick_profile(None, Ranks(), log.append, log.append, threads=1).rate("cpu_adam_params_per_s"), log


def test_a_cached_profile_is_read_instead_of_measuring_on_the_same_machine(
    folder: Path, measured: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "triton_version", lambda: "")
    assert profile_and_log() == (1e9 + 1, ["A quick hardware profile was measured."])
    (file,) = folder.iterdir()
    assert profile_and_log() == (1e9 + 1, [f"Hardware profile of 2026-01-02, read from {file}."])
    # The GPU's Adam, which is waived without Triton, is not waived forever.
    monkeypatch.setattr(cache, "triton_version", lambda: "3.6.0")
    assert [profile_and_log()[0] for _ in range(2)] == [1e9 + 2] * 2
    for _ in range(2):
        assert quick_profile(None, Ranks(), print, print, threads=1, cores=(0,)).rate(REQUIRED[0]) == 1e9 + 3
    assert len(measured) == 3


def test_a_file_that_is_no_profile_is_replaced_by_a_new_measurement(folder: Path) -> None:
    profile_and_log()
    (file,) = folder.iterdir()
    written = file.read_text()
    # An old version, nothing measured, and a wrong value.
    changes: list[dict[str, Any]] = [{"version": 0}, {"measurements": {}}, {"provenance": {"text": 3}}]
    others = [json.dumps({**json.loads(written), **change}) for change in changes]
    # Empty, cut off, and no text.
    for number, spoiled in enumerate(["", written[:-20], "\udcff\udcfe", *others], start=2):
        file.write_text(spoiled, errors="surrogateescape")
        assert [profile_and_log()[0] for _ in range(2)] == [1e9 + number] * 2
    assert list(folder.iterdir()) == [file]
    # What cannot be replaced leaves no partial file, and the profile is used.
    file.unlink()
    file.mkdir()
    assert "Set XDG_CACHE_HOME to a folder that can be written" in profile_and_log()[1][-1]
    assert list(folder.iterdir()) == [file]


TOO_FAST = {"both_beside_cpu_adam_bytes_per_s": Measurement(samples=(1e12,))}


@pytest.mark.parametrize(
    ("waived", "is_cached"),
    [
        ({"gpu_adam_params_per_s": Measurement(waived=NO_ACCELERATOR)}, True),
        (noise_waivers(profile().measurements | TOO_FAST), False),
    ],
    ids=["no accelerator", "a rate that is far above the rate alone"],
)
def test_a_profile_is_measured_again_only_if_a_quantity_was_implausible(
    waived: dict[str, Measurement], is_cached: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert waived
    quiet = cache.measure

    def disturbed(*arguments: Any, **kernels: Any) -> HardwareProfile:
        found = quiet(*arguments, **kernels)
        return replace(found, measurements={**found.measurements, **waived})

    monkeypatch.setattr(cache, "measure", disturbed)
    rate, log = profile_and_log()
    assert rate == 1e9 + 1
    message = "not cached, and the next start measures again: both_beside_cpu_adam_bytes_per_s had"
    assert (message in log[-1]) is not is_cached
    monkeypatch.setattr(cache, "measure", quiet)
    assert [profile_and_log()[0] for _ in range(2)] == [1e9 + (1 if is_cached else 2)] * 2


def profiles_of_a_rank() -> tuple[list[str], list[str], int]:
    def broken_on_rank_1(num_sub_groups: int, num_threads: int, cores: Sequence[int]) -> AdamKernel:
        if torch.distributed.get_rank() == 1:
            raise RuntimeError("broken on purpose")
        return training_cpu_adam(num_sub_groups, num_threads, cores)

    log: list[str] = []

    def outcome(cpu_adam: Any, effort: ProbeEffort) -> str:
        with kernels(training_cpu_adam=cpu_adam):
            return quick_profile(None, Ranks(), log.append, log.append, threads=1, effort=effort).to_json()

    with launched_ranks(os.environ) as ranks:
        assert ranks.size == 2
        outcomes = [outcome(training_cpu_adam, SMALL) for _ in range(2)]
        # Another effort has another place in the cache.
        with pytest.raises(ProfileError) as failure:
            outcome(broken_on_rank_1, replace(SMALL, budget_s=0.02))
    assert not torch.distributed.is_initialized()
    threads = {(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()}
    assert not {name for name in threads if "gloo" in name}, "threads of the group are still alive"
    return [*outcomes, str(failure.value)], log, torch.get_num_threads()


def test_two_ranks_measure_together_once_and_fail_together(tmp_path: Path) -> None:
    first, second = on_ranks(2, profiles_of_a_rank, group=nullcontext, XDG_CACHE_HOME=str(tmp_path))
    assert second[0] == first[0], "the same profile, and the same reason, on all ranks"
    measured, cached, failed = first[0]
    assert cached == measured
    profile = HardwareProfile.from_json(measured)
    assert (profile.provenance.ranks, profile.provenance.cores) == (2, 2)
    assert profile.measurements["cpu_adam_threads"].waived == BY_PROFILE_ALONE, "training does not wait for it"
    assert failed.startswith("cpu_adam_params_per_s: is needed for every prediction, found no measurement")
    assert "(rank 1: RuntimeError: broken on purpose)" in failed
    assert [line.split(maxsplit=1)[0] for line in first[1]] == ["A", "Hardware"]
    assert second[1] == []
    assert (first[2], second[2]) == (1, 1)
    assert len(list((tmp_path / "deep_opt_states").iterdir())) == 1


def test_each_last_level_cache_is_counted_once(tmp_path: Path) -> None:
    for cpu in range(4):
        caches = [("1", "32K", str(cpu)), ("3", "2048K", "0-1" if cpu < 2 else "2-3")]
        for index, texts in enumerate(caches):
            folder = tmp_path / f"cpu{cpu}/cache/index{index}"
            folder.mkdir(parents=True)
            for name, text in zip(("level", "size", "shared_cpu_list"), texts, strict=True):
                (folder / name).write_text(f"{text}\n")
    (tmp_path / "cpu3/cache/index1/size").write_text("no size\n")
    assert machine.last_level_cache_bytes(tmp_path) == 2 * 2048 * 1024
    (tmp_path / "cpu2/cache/index1/size").unlink()
    assert machine.last_level_cache_bytes(tmp_path) == 2048 * 1024
    assert machine.last_level_cache_bytes(tmp_path / "nothing") is None


def test_the_names_of_the_cpu_and_of_the_driver_are_read_from_files_or_nvidia_smi(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpuinfo, version, nothing, smi = (tmp_path / name for name in ("cpuinfo", "version", "nothing", "nvidia-smi"))
    cpuinfo.write_text("processor\t: 0\nmodel name\t: AMD EPYC 9654 96-Core Processor\nmodel\t: 17\n")
    assert machine.cpu_name(cpuinfo) == "AMD EPYC 9654 96-Core Processor"
    assert machine.cpu_name(nothing) == platform.machine()
    version.write_text("550.54.15\n")
    assert machine.driver_version(version) == "550.54.15"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.driver_version(nothing) == ""
    smi.write_text("#!/bin/sh\necho 535.129.03\necho 535.129.03\n")
    smi.chmod(0o755)
    assert machine.driver_version(nothing) == "535.129.03"


VERSIONS = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", 2**63 - 4096),
    2: ("memory.max", "memory.current", "inactive_file", "max"),
}


@pytest.mark.parametrize("version", VERSIONS)
def test_each_memory_limit_is_compared_with_the_usage_of_its_own_group(tmp_path: Path, version: int) -> None:
    """Check also that file cache, which can be reclaimed, counts as free."""
    limit_file, usage_file, cache_name, unlimited = VERSIONS[version]
    top, job, step = tmp_path, tmp_path / "job", tmp_path / "job/step"

    def left_bytes(step_limit: object, step_usage: int, job_cache: int = 0) -> int | None:
        for folder, limit, usage in ((top, unlimited, 900), (job, 100, 95), (step, step_limit, step_usage)):
            folder.mkdir(exist_ok=True)
            (folder / limit_file).write_text(f"{limit}\n")
            (folder / usage_file).write_text(f"{usage}\n")
            (folder / "memory.stat").write_text(f"anon 5\n{cache_name} {job_cache if folder == job else 0}\n")
        return machine.memory_left_bytes([step, job, top])

    assert left_bytes(unlimited, 1) == 5, "the job's other tasks use the rest"
    assert left_bytes(unlimited, 1, job_cache=30) == 35
    assert left_bytes(40, 38) == 2, "the limit of the step is lower than that of the job"
    assert machine.memory_left_bytes([top, tmp_path / "nothing"]) is None
    (job / "memory.stat").unlink()
    assert machine.memory_left_bytes([job]) == 100, "the usage is unknown"
