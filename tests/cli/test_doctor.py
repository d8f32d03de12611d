"""Test the commands that examine this machine: ``doctor`` names obstacles to training, and ``profile`` measures."""

from __future__ import annotations

import errno
import json
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from packaging.requirements import Requirement
from torch.utils import cpp_extension
from torch.utils.file_baton import FileBaton

from deep_opt_states import doctor
from deep_opt_states.cli import doctor_command, profile_command
from deep_opt_states.cli.config_check import examine_config
from deep_opt_states.cli.main import main
from deep_opt_states.cli.profile_command import check_output
from deep_opt_states.device import state_file
from deep_opt_states.doctor import Finding, Status
from deep_opt_states.host import machine as host
from deep_opt_states.profiler import disk
from deep_opt_states.profiler.disk import measure_disks, measure_quantities
from deep_opt_states.profiler.probes import ProbeError
from deep_opt_states.profiler.ranks import Ranks
from perf_model.prediction.hardware import (
    DISK_QUANTITIES,
    REQUIRED,
    HardwareProfile,
    Measurement,
    ProfileError,
    Provenance,
)
from tests.launch import REPOSITORY, Finished, environment

FOLDER = Path("/cache/cpu_adam")
BUILT, NOT_BUILT, PREBUILT = Path(__file__), FOLDER / "cpu_adam.so", None
LOCK = FOLDER / "lock"
GPUS = [("NVIDIA H100", 85 * 10**9)] * 2
TORCH = Requirement("torch>=2.10")
FAIL, WARN, OK = Status.FAIL, Status.WARN, Status.OK
BROKEN = ImportError("no [hjson]")
FINDINGS: list[tuple[Callable[..., Finding], tuple[object, ...], Status, str]] = [
    (doctor.check_package, (TORCH, "2.9.1+cu128"), FAIL, "2.9.1"),
    (doctor.check_package, (TORCH, "2.13.0+cpu"), OK, "2.13.0+cpu"),
    (doctor.check_package, (Requirement("wrapt"), None), FAIL, ""),
    (doctor.check_deepspeed, ("0.17.5", None), FAIL, "0.17.5; must be 0.17.6 or later"),
    (doctor.check_deepspeed, ("0.19.8", BROKEN), FAIL, "no [hjson]"),
    (doctor.check_deepspeed, ("0.19.9", None), WARN, "0.19.9"),
    (doctor.check_deepspeed, ("0.19.8+abc", None), OK, "0.19.8+abc"),
    (doctor.check_accelerator, ("xpu", 8, [], None), FAIL, "xpu"),
    (doctor.check_accelerator, ("cuda", 0, [], None), FAIL, ""),
    (doctor.check_accelerator, ("cpu", 1, [], None), WARN, "cpu"),
    (doctor.check_accelerator, ("cuda", 2, GPUS, None), OK, "NVIDIA H100 (85.0 GB), NVIDIA H100"),
    (partial(doctor.check_hook, has_entry_point=True, is_active=True), ("0",), FAIL, ""),
    (partial(doctor.check_hook, has_entry_point=False, is_active=True), (None,), FAIL, ""),
    (partial(doctor.check_hook, has_entry_point=True, is_active=False), ("1",), FAIL, ""),
    (doctor.check_switch, ("0",), WARN, ""),
    (doctor.check_switch, ("false",), WARN, "false"),
    (partial(doctor.check_memlock, has_cuda=True), (8 * 2**20,), WARN, ""),
    (partial(doctor.check_memlock, has_cuda=True), (None,), OK, "unlimited"),
    (partial(doctor.check_memlock, has_cuda=False), (8 * 2**20,), OK, "nothing is pinned"),
    (partial(doctor.check_connections, has_cuda=True), ("all",), WARN, "all"),
    (partial(doctor.check_connections, has_cuda=True), ("32",), OK, "32 hardware queues"),
    (partial(doctor.check_connections, has_cuda=False), ("1",), OK, "1; a GPU has 8"),
    (partial(doctor.check_triton, has_cuda=True), (None,), WARN, ""),
    (partial(doctor.check_triton, has_cuda=False), (None,), OK, "only GPUs need it"),
    (partial(doctor.check_extension, ours=False), (NOT_BUILT, ["c++"]), FAIL, "c++"),
    (partial(doctor.check_extension, ours=False), (BUILT, ["ninja"]), FAIL, "ninja"),
    (partial(doctor.check_extension, ours=False), (NOT_BUILT, []), WARN, ""),
    (partial(doctor.check_extension, ours=True), (NOT_BUILT, ["c++"]), WARN, ""),
    (partial(doctor.check_extension, ours=False), (PREBUILT, ["c++", "ninja"]), OK, "prebuilt"),
    (partial(doctor.check_extension, ours=False), (BUILT, ["c++"]), OK, f"built in {BUILT.parent}"),
    (doctor.check_locks, ({LOCK: [], FOLDER / "other/lock": [7]},), FAIL, ""),
    (doctor.check_locks, ({LOCK: [7]},), WARN, ""),
    (doctor.check_locks, ({},), OK, "none"),
]


def test_a_condition_is_good_costs_time_or_keeps_training_from_starting(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    for check, arguments, status, found in FINDINGS:
        finding = check(*arguments)
        assert (finding.status, found in finding.found) == (status, True), finding
        monkeypatch.setattr(doctor_command, "examine", lambda environ, finding=finding: {"topic": finding})
        assert main(["doctor"]) == (status is FAIL)
        page = capsys.readouterr().out
        assert page.splitlines()[0].split() == f"{status.name} topic {finding.found}".split()
        assert status is OK or f"-> {finding.remedy}" in page
        assert ("FAIL: topic;" in page.splitlines()[-1]) is (status is FAIL)


def test_the_limits_of_a_cgroup_version_2_include_its_parents_limits(tmp_path: Path) -> None:
    membership = tmp_path / "membership"
    membership.write_text("0::/job/step\n")
    (tmp_path / "job/step").mkdir(parents=True)
    (tmp_path / "job/step/cpu.max").write_text("max 100000\n")
    (tmp_path / "job/cpu.max").write_text("350000 100000\n")
    (tmp_path / "job/step/memory.max").write_text("max\n")
    (tmp_path / "job/memory.max").write_text("8000000000\n")
    assert host.core_quota(host.cgroup_folders("cpu", membership, tmp_path)) == 3.5
    assert host.memory_limit_bytes(host.cgroup_folders("memory", membership, tmp_path)) == 8 * 10**9


def run_doctor(*arguments: str, **changes: str) -> Finished:
    command = [str(Path(sys.executable).with_name("deep-opt-states")), "doctor", *arguments]
    env = environment(COLUMNS="300", **changes)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    return Finished(done.returncode, done.stdout)


def rows(page: Finished) -> dict[str, str]:
    topics = ("deepspeed", "activation hook", "accelerator", "cpu_adam", "C++ Adam kernel", "locks of builds")
    lines = [line.split(maxsplit=1) for line in page.output.splitlines() if line.startswith(("OK", "WARN", "FAIL "))]
    return {topic: status for status, row in lines for topic in topics if row.startswith(topic + " ")}


def test_this_machine_can_train_and_nothing_is_built(tmp_path: Path) -> None:
    page = run_doctor(TORCH_EXTENSIONS_DIR=str(tmp_path))
    assert page.returncode == 0, page.output
    found = rows(page)
    # The doctor looks into the empty folder of this test, unless DeepSpeed's op is prebuilt.
    assert (found.pop("cpu_adam") in ("OK", "WARN"), found.pop("C++ Adam kernel")) == (True, "WARN")
    assert found == dict.fromkeys(("deepspeed", "activation hook", "accelerator", "locks of builds"), "OK")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert "Training can start." in page.output


def test_an_unsupported_deepspeed_and_a_broken_wrapt_fail(tmp_path: Path) -> None:
    (tmp_path / "wrapt.py").write_text("raise RuntimeError('broken on purpose')\n")
    (tmp_path / "deepspeed.py").write_text("__version__ = '0.17.5'\n")
    (tmp_path / "deepspeed-0.17.5.dist-info").mkdir()
    (tmp_path / "deepspeed-0.17.5.dist-info/METADATA").write_text("Name: deepspeed\nVersion: 0.17.5\n")
    path = f"{tmp_path}:{REPOSITORY}"
    page = run_doctor(PYTHONPATH=path)
    assert page.returncode == 1
    assert [rows(page)[topic] for topic in ("deepspeed", "activation hook", "accelerator")] == ["FAIL"] * 3, page.output
    assert "-> pip install deepspeed==0.19.8" in page.output
    assert "found that it fails: RuntimeError: broken on purpose" in page.output


def test_the_locks_of_killed_and_running_builds_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "utils").mkdir()
    lock, left = tmp_path / "utils/lock", tmp_path / "utils/.ninja_lock"
    left.touch()
    assert FileBaton(str(lock)).try_acquire()
    assert doctor._locks() == {lock: [os.getpid()], left: []}
    assert doctor.check_locks(doctor._locks()).remedy.endswith(f"rm {left}")
    # PyTorch 2.14 leaves the file of a lock that the kernel releases.
    monkeypatch.setattr(cpp_extension, "FileLock", object, raising=False)
    assert doctor._locks() == {left: []}


STAGE_3 = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}, "bf16": {"enabled": True}}
FOR_TRAINER = {
    **{"train_batch_size": 64, "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"},
    **{"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}, **STAGE_3, "bf16": {"enabled": "auto"}},
    **{"deep_optimizer_states": {"placement": "cpu"}},
}


def on_disk(folder: Path | str) -> dict[str, Any]:
    offload = {"device": "nvme", "nvme_path": str(folder)}
    return {**STAGE_3, "zero_optimization": {"stage": 3, "offload_optimizer": offload}, "deep_optimizer_states": {}}


NO_OBJECT = "A DeepSpeed config must be a file with a JSON object, found"
CONFIGS: list[tuple[object, Status, str]] = [
    # Trainer fills in values, and DeepSpeed accepts comments and a batch for any number of ranks.
    ("# a comment\n" + json.dumps(FOR_TRAINER), OK, "accepted, with placement 'cpu'"),
    ({"deep_optimizer_states": {"enabled": False}}, WARN, "stock DeepSpeed trains"),
    (STAGE_3, FAIL, "found no such block: stock DeepSpeed trains"),
    ({**STAGE_3, "deep_opt_states": {}}, FAIL, "deep_opt_states: has no effect"),
    ({"zero_optimization": {"stage": 3, "deep_optimizer_states": {}}}, FAIL, 'inside "zero_optim'),
    ({**STAGE_3, "deep_optimizer_states": {"unit_size": -1, "plcement": "cpu"}}, FAIL, "not a known key"),
    ({"deep_optimizer_states": {}, "zero_optimization": {"stage": 2}}, FAIL, "stage: must be 3"),
    ({**STAGE_3, "deep_optimizer_states": {"profile": "/no/file"}}, FAIL, "No such file"),
    (on_disk("/sys"), FAIL, "can create files, found /sys"),
    ({"zero_optimization": {"stge": 3}, "deep_optimizer_states": {}}, FAIL, "must accept the config"),
    ([1], FAIL, "with another value"),
    ('{"a": ', FAIL, NO_OBJECT),
    ('{"a": 1, "a": 2}', FAIL, NO_OBJECT),
]


def test_a_config_is_checked_rule_by_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    path = tmp_path / "ds.json"
    for config, status, found in CONFIGS:
        path.write_text(config if isinstance(config, str) else json.dumps(config))
        assert main(["doctor", "--config", str(path)]) == (status is FAIL)
        page = capsys.readouterr().out
        rows = [line for line in page.splitlines() if line.startswith(f"{status.name}  ")]
        assert [row for row in rows if found in row], page
        assert page.count("-> ") >= len(rows) or status is OK, "each broken rule has a remedy"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> HardwareProfile:
    """Return the profile that is measured instead of one of this machine; training a few layers takes a minute."""
    samples = {**dict.fromkeys(REQUIRED, (1e9,)), "copy_latency_s": (9.5e-6, 10.5e-6, 9.75e-6)}
    samples["cpu_adam_threads"] = (4.0,)
    samples |= {"h2d_bytes_per_s": (24.5e9, 25.5e9, 24.9e9), "dram_update_bytes_per_s": (205e9,) * 3}
    measurements = {name: Measurement(samples=values) for name, values in samples.items()}
    measurements["d2h_bytes_per_s"] = Measurement(waived="[reason]")
    found = HardwareProfile(name="here", provenance=Provenance(source="measured", cores=8), measurements=measurements)
    monkeypatch.setattr(profile_command, "measure", lambda *arguments, **options: found)
    step = {"module_forward_s": Measurement(samples=(6e-4,))}
    monkeypatch.setattr(profile_command, "measure_training", lambda ranks: step)
    return found


def test_rank_0_writes_and_prints_quantities_in_readable_units_and_a_full_profile_trains_a_few_layers(
    measured: HardwareProfile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "profile.json"
    assert main(["profile", "--output", str(output)]) == 0
    trained = HardwareProfile.read(output).measurements
    assert trained.keys() - measured.measurements.keys() == {"module_forward_s"}
    assert main(["profile", "--quick", "--output", str(output)]) == 0
    assert HardwareProfile.read(output) == measured
    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for row in (
        "h2d_bytes_per_s 24.9 24.5 to 25.5 GB/s",
        "copy_latency_s 9.75 9.5 to 10.5 us",
        "d2h_bytes_per_s WAIVED (1)",
        "(1) [reason]",
        "cpu_adam_threads 4 4 to 4 threads",
        '4 of 8 CPU threads update at the full rate ("cpu_threads": 4)',
    ):
        assert row in rows, rows
    # Rank 1 does not need the folder: it may run on a node that does not have it.
    monkeypatch.setenv("RANK", "1")
    assert main(["profile", "--output", str(tmp_path / "nowhere/profile.json")]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("rank", ["0", "1"])
def test_an_existing_profile_is_kept_if_the_measurement_fails_and_rank_0_prints_the_error(
    rank: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = ProfileError("no [kernel]: rule, value.\nRemedy.")
    monkeypatch.setattr(profile_command, "measure", mock.Mock(side_effect=error))
    monkeypatch.setenv("RANK", rank)
    output = tmp_path / "profile.json"
    output.write_text("old")
    assert main(["profile", "--output", str(output)]) == 1
    assert ("no [kernel]: rule, value.\nRemedy." in capsys.readouterr().err) is (rank == "0")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


@pytest.mark.parametrize(
    ("path", "found"), [("none/profile.json", "No such file or directory"), ("folder", "not a regular file")]
)
def test_an_output_that_cannot_be_written_is_refused_before_measuring(
    path: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(profile_command, "measure", None)
    (tmp_path / "folder").mkdir()
    assert main(["profile", "--output", str(tmp_path / path)]) == 1
    message = capsys.readouterr().err
    assert message.startswith("--output: must be a file, to be written or replaced, in a folder that can be written;")
    assert found in message
    monkeypatch.setattr(profile_command, "replace_file", mock.Mock(side_effect=OSError(30, "Read-only file system")))
    with pytest.raises(ProfileError, match="Read-only file system"):
        check_output(tmp_path / "profile.json")


def test_a_profile_says_its_ranks_which_need_a_gpu_each(
    measured: HardwareProfile, capsys: pytest.CaptureFixture[str]
) -> None:
    profile_command._print(measured, 4)
    assert "(of 4; the ranks of a node load that node only)" in " ".join(capsys.readouterr().out.split())
    cuda = SimpleNamespace(device_name=lambda: "cuda", device_count=lambda: 2)
    with (
        mock.patch("deepspeed.accelerator.get_accelerator", return_value=cuda),
        pytest.raises(ProfileError, match="less than the number of GPUs, 2; found 3"),
    ):
        profile_command._accelerator(3)


def test_a_compiler_that_does_not_run_is_missing() -> None:
    assert "no-such-compiler -O2" in doctor._missing_tools({"CXX": "no-such-compiler -O2"})


def test_folders_are_doubted_in_memory_without_direct_io_and_where_the_page_cache_answers(tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    config.write_text(json.dumps(on_disk(tmp_path)))
    for kind, doubt in {"tmpfs": "is on tmpfs", "nfs4": "has no direct I/O"}.items():
        patched = [mock.patch.object(module, "file_system", return_value=kind) for module in (disk, state_file)]
        with patched[0], patched[1]:
            assert [doubt in found for found in disk.doubts([tmp_path])] == [True]
            [finding] = examine_config(config).values()
            assert finding.status is WARN
            assert doubt in finding.found
    # A read by way of the page cache leaves the page there.
    direct_read, buffered = state_file.StateFile.read, os.open

    def cached_read(file: state_file.StateFile, memory: memoryview, offset_bytes: int) -> None:
        direct_read(file, memory, offset_bytes)
        through_cache = buffered(f"/proc/self/fd/{file.fd}", os.O_RDONLY)
        os.pread(through_cache, len(memory), offset_bytes)
        os.close(through_cache)

    assert disk.doubts([tmp_path]) == []
    with mock.patch.object(state_file.StateFile, "read", cached_read):
        assert ["the page cache may answer" in found for found in disk.doubts([tmp_path])] == [True]
    refused = mock.patch.object(mmap, "mmap", side_effect=[mmap.mmap(-1, 4096), OSError(errno.ENODEV, "no mapping")])
    with refused, pytest.raises(state_file.DiskError, match=f"writable in {tmp_path}.*a mapping of it was refused"):
        disk.doubts([tmp_path])


def test_disks_are_measured_with_the_blocks_and_the_io_of_training(tmp_path: Path) -> None:
    with mock.patch.multiple(disk, BLOCK_BYTES=2**16, NUM_BLOCKS=2, REPETITIONS=3):
        both_folders = measure_disks([tmp_path, tmp_path])
        found = measure_quantities(Ranks(), [tmp_path])
    assert min(both_folders) > 0
    assert found.keys() == DISK_QUANTITIES.keys()
    assert all(len(measurement.samples) == 3 and min(measurement.samples) > 0 for measurement in found.values())
    with pytest.raises(ProbeError, match="can create files"):
        measure_quantities(Ranks(), [tmp_path / "none"])
    assert list(tmp_path.iterdir()) == []
