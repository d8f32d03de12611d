"""Test ``deep-opt-states doctor``: it finds each condition that keeps training from starting, and names a remedy."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from deep_opt_states.cli import doctor_command
from deep_opt_states.cli.main import main
from deep_opt_states.doctor import Finding, Status, compiled_kernels, hook, host_limits, software
from deep_opt_states.doctor.compiled_kernels import Extension
from deep_opt_states.doctor.hook import AfterImport
from deep_opt_states.doctor.software import Accelerator
from deep_opt_states.host import machine as host
from deep_opt_states.host.machine import CoreCounts, HostMemory
from tests.launch import Finished, environment

FOLDER = Path("/cache/cpu_adam")

own_adam = compiled_kernels.check_own_adam

FAILS: dict[str, Callable[[], Finding]] = {
    "old python": lambda: software.check_python("3.9.18", SpecifierSet(">=3.10")),
    "not installed": lambda: software.check_ours(None),
    "old torch": lambda: software.check_package(Requirement("torch>=2.10"), "2.9.1+cu128"),
    "no wrapt": lambda: software.check_package(Requirement("wrapt"), None),
    "no deepspeed": lambda: software.check_deepspeed(None, None),
    "other deepspeed": lambda: software.check_deepspeed("0.18.2", None),
    "broken deepspeed": lambda: software.check_deepspeed("0.19.8", ImportError("no [hjson]")),
    "no supported accelerator": lambda: software.check_accelerator(Accelerator("xpu", 8), None),
    "no GPU": lambda: software.check_accelerator(Accelerator("cuda", 0), None),
    "autoload off": lambda: hook.check_hook(AfterImport(active=False), "0"),
    "hook not active": lambda: hook.check_hook(AfterImport(active=False), None),
    "hook fails": lambda: hook.check_hook(AfterImport(active=False, message="ImportError: wrapt"), "1"),
    "no compiler": lambda: compiled_kernels.check_compiler("c++", None, Extension(folder=FOLDER)),
    "no ninja": lambda: compiled_kernels.check_ninja(None, Extension(folder=FOLDER, built=True)),
    "cpu_adam cannot be built": lambda: compiled_kernels.check_cpu_adam(Extension(folder=FOLDER), can_build=False),
    "cpu_adam is of no use": lambda: compiled_kernels.check_cpu_adam(
        Extension(problem="PyTorch version mismatch"), can_build=True
    ),
}

WARNS: dict[str, Callable[[], Finding]] = {
    "deepspeed that was not tested": lambda: software.check_deepspeed("0.19.9", None),
    "cpu by accident": lambda: software.check_accelerator(Accelerator("cpu", 1), None),
    "switched off": lambda: hook.check_switch("0"),
    "switch without meaning": lambda: hook.check_switch("false"),
    "one core": lambda: host_limits.check_cores(CoreCounts(physical=8, logical=16, allowed=16, quota=1.5)),
    "too many threads": lambda: host_limits.check_omp("16,2", 8),
    "not a number of threads": lambda: host_limits.check_omp("all", 8),
    "memlock": lambda: host_limits.check_memlock(8 * 2**20, has_cuda=True),
    "one hardware queue": lambda: host_limits.check_connections("1", has_cuda=True),
    "few hardware queues": lambda: host_limits.check_connections("4", has_cuda=True),
    "not a number of hardware queues": lambda: host_limits.check_connections("all", has_cuda=True),
    "no compiler yet": lambda: compiled_kernels.check_compiler("c++", None, Extension(folder=FOLDER, built=True)),
    "no ninja yet": lambda: compiled_kernels.check_ninja(None, Extension(prebuilt=True)),
    "locked": lambda: compiled_kernels.check_cpu_adam(
        Extension(folder=FOLDER, built=True, locked=True), can_build=True
    ),
    "own kernel is of no use": lambda: own_adam(
        Extension(problem="PermissionError"), has_compiler=True, has_ninja=True
    ),
    "own kernel is locked": lambda: own_adam(
        Extension(folder=FOLDER, built=True, locked=True), has_compiler=True, has_ninja=True
    ),
    "own kernel is not built": lambda: own_adam(Extension(folder=FOLDER), has_compiler=True, has_ninja=True),
    "own kernel cannot be built": lambda: own_adam(Extension(folder=FOLDER), has_compiler=False, has_ninja=True),
    "own kernel cannot be loaded": lambda: own_adam(
        Extension(folder=FOLDER, built=True), has_compiler=True, has_ninja=False
    ),
    "no triton": lambda: compiled_kernels.check_triton("", has_cuda=True),
    "not built yet": lambda: compiled_kernels.check_cpu_adam(Extension(folder=FOLDER), can_build=True),
}

GPUS = Accelerator("cuda", 2, [("NVIDIA H100", 85 * 10**9)] * 2)

OKS: dict[str, tuple[Callable[[], Finding], str]] = {
    "torch": (lambda: software.check_package(Requirement("torch>=2.10"), "2.13.0+cpu"), "2.13.0+cpu"),
    "deepspeed": (lambda: software.check_deepspeed("0.19.8+abc", None), "0.19.8+abc"),
    "cpu": (lambda: software.check_accelerator(Accelerator("cpu", 1), "cpu"), "cpu, 1 device"),
    "cuda": (lambda: software.check_accelerator(GPUS, None), "NVIDIA H100 (85.0 GB), NVIDIA H100 (85.0 GB)"),
    "hook": (lambda: hook.check_hook(AfterImport(active=True), None), "active"),
    "cost": (lambda: hook.check_cost([0.004, 0.003, 0.009]), "4.0 ms, median of 3 fresh interpreters (3.0 to 9.0 ms)"),
    "cores": (lambda: host_limits.check_cores(CoreCounts(8, 16, allowed=12, quota=6.5)), "may use 6 "),
    "threads": (lambda: host_limits.check_omp("4", 8), "4 of 8"),
    "one thread": (lambda: host_limits.check_omp("1", 8), "updates have threads of their own"),
    "no OMP_NUM_THREADS": (lambda: host_limits.check_omp(None, 8), "updates have their own threads"),
    "memory": (lambda: host_limits.check_memory(HostMemory(64 * 10**9, 10**9, 32 * 10**9)), "container limit 32.0 GB"),
    "all memory": (lambda: host_limits.check_memory(HostMemory(64 * 10**9, 10**9, 2**60)), "no container limit"),
    "memlock": (lambda: host_limits.check_memlock(None, has_cuda=True), "unlimited"),
    "no CUDA_DEVICE_MAX_CONNECTIONS": (
        lambda: host_limits.check_connections(None, has_cuda=True),
        "unset: 8 hardware queues for 9 streams",
    ),
    "as many hardware queues as by default": (
        lambda: host_limits.check_connections("8", has_cuda=True),
        "8 hardware queues",
    ),
    "hardware queues": (lambda: host_limits.check_connections("32", has_cuda=True), "32 hardware queues"),
    "no GPU for hardware queues": (lambda: host_limits.check_connections("1", has_cuda=False), "1; only a GPU has"),
    "triton": (lambda: compiled_kernels.check_triton("3.6.0", has_cuda=True), "3.6.0"),
    "no GPU for triton": (
        lambda: compiled_kernels.check_triton("", has_cuda=False),
        "not installed; only GPUs need it",
    ),
    "prebuilt": (lambda: compiled_kernels.check_cpu_adam(Extension(prebuilt=True), can_build=False), "prebuilt"),
    "own kernel": (
        lambda: own_adam(Extension(folder=FOLDER, built=True), has_compiler=False, has_ninja=True),
        f"built in {FOLDER}",
    ),
    "built": (
        lambda: compiled_kernels.check_cpu_adam(Extension(folder=FOLDER, built=True), can_build=False),
        f"built in {FOLDER}",
    ),
}


def page_of(finding: Finding, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    monkeypatch.setattr(doctor_command, "examine", lambda environ: {"Section": [finding]})
    monkeypatch.setenv("COLUMNS", "300")
    return main(["doctor"]), capsys.readouterr().out


@pytest.mark.parametrize("check", FAILS.values(), ids=FAILS)
def test_a_condition_that_keeps_training_from_starting_fails(
    check: Callable[[], Finding], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finding = check()
    code, page = page_of(finding, monkeypatch, capsys)
    assert (finding.status, code) == (Status.FAIL, 1)
    assert page.splitlines()[1].split() == f"FAIL {finding.topic} {finding.found}".split()
    assert f"-> {finding.remedy}" in page
    assert f"FAIL: {finding.topic};" in page.splitlines()[-1]


@pytest.mark.parametrize("check", WARNS.values(), ids=WARNS)
def test_a_condition_that_only_costs_time_warns(
    check: Callable[[], Finding], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finding = check()
    code, page = page_of(finding, monkeypatch, capsys)
    assert (finding.status, code) == (Status.WARN, 0)
    assert page.splitlines()[1].startswith("WARN")
    assert f"-> {finding.remedy}" in page


@pytest.mark.parametrize(("check", "found"), OKS.values(), ids=OKS)
def test_a_good_condition_is_shown_as_ok(check: Callable[[], Finding], found: str) -> None:
    finding = check()
    assert finding.status is Status.OK
    assert found in finding.found


def test_requirements_come_from_our_own_metadata() -> None:
    required = {requirement.name: str(requirement.specifier) for requirement in software.requirements()}
    assert {"deepspeed", "psutil", "rich", "wrapt"} < set(required)
    assert "pytest" not in required
    assert required["torch"] == ">=2.10"
    assert str(software.python_required()) == ">=3.10"


def test_the_limits_of_a_cgroup_version_2_include_those_of_its_parents(tmp_path: Path) -> None:
    membership = tmp_path / "membership"
    membership.write_text("0::/job/step\n")
    (tmp_path / "job/step").mkdir(parents=True)
    (tmp_path / "job/step/cpu.max").write_text("max 100000\n")
    (tmp_path / "job/cpu.max").write_text("350000 100000\n")
    (tmp_path / "job/step/memory.max").write_text("max\n")
    (tmp_path / "job/memory.max").write_text("8000000000\n")
    assert host.core_quota(host.cgroup_folders("cpu", membership, tmp_path)) == 3.5
    assert host.memory_limit_bytes(host.cgroup_folders("memory", membership, tmp_path)) == 8 * 10**9


def test_the_limits_of_a_cgroup_version_1_are_read_where_only_the_top_is_mounted(tmp_path: Path) -> None:
    membership = tmp_path / "membership"
    membership.write_text("5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/\n")
    for name, text in {"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory/memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert host.core_quota(host.cgroup_folders("cpu", membership, tmp_path)) == 2.0
    assert host.memory_limit_bytes(host.cgroup_folders("memory", membership, tmp_path)) is None


def doctor(**changes: str) -> Finished:
    """Run the installed command on this machine."""
    command = [str(Path(sys.executable).with_name("deep-opt-states")), "doctor"]
    env = environment(COLUMNS="300", **changes)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    return Finished(done.returncode, done.stdout)


def rows(page: Finished) -> dict[str, str]:
    """Return the status of each topic."""
    topics = (
        "deepspeed",
        "activation hook",
        "accelerator",
        "cores",
        "host memory",
        "C++ compiler",
        "ninja",
        "cpu_adam",
        "C++ Adam kernel",
    )
    lines = [line.split(maxsplit=1) for line in page.output.splitlines() if line.startswith(("OK", "WARN", "FAIL "))]
    return {topic: status for status, row in lines for topic in topics if row.startswith(topic + " ")}


def test_this_machine_can_train(tmp_path: Path) -> None:
    page = doctor(TORCH_EXTENSIONS_DIR=str(tmp_path))
    assert page.returncode == 0, page.output
    found = rows(page)
    assert found.pop("cpu_adam") in ("OK", "WARN")
    # The doctor looks into the empty folder of this test.
    assert found.pop("C++ Adam kernel") == "WARN"
    assert found == dict.fromkeys(found, "OK")
    assert len(found) == 7
    for topic in (
        "python",
        "torch",
        "wrapt",
        "cost at import torch",
        "OMP_NUM_THREADS",
        "memlock limit",
        "CUDA_DEVICE_MAX_CONNECTIONS",
    ):
        assert topic in page.output
    assert not [path for path in tmp_path.rglob("*") if path.is_file()], "the doctor must not build anything"
    assert "Training can start." in page.output


def test_a_broken_deepspeed_and_a_disabled_autoload_fail(tmp_path: Path) -> None:
    (tmp_path / "deepspeed.py").write_text("raise ImportError('broken on purpose')\n")
    page = doctor(PYTHONPATH=str(tmp_path), TORCH_DEVICE_BACKEND_AUTOLOAD="0", CXX="no-such-compiler", PATH="")
    assert page.returncode == 1
    fails = ("deepspeed", "activation hook", "accelerator", "C++ compiler", "ninja", "cpu_adam")
    assert rows(page) == {
        **dict.fromkeys(fails, "FAIL"),
        "cores": "OK",
        "host memory": "OK",
        "C++ Adam kernel": "WARN",
    }, page.output
    assert "ImportError: broken on purpose" in page.output
    assert "-> Unset TORCH_DEVICE_BACKEND_AUTOLOAD, or import deep_opt_states" in page.output
    assert "no-such-compiler" in page.output


def test_an_unsupported_deepspeed_and_a_broken_wrapt_fail(tmp_path: Path) -> None:
    (tmp_path / "wrapt.py").write_text("raise RuntimeError('broken on purpose')\n")
    (tmp_path / "deepspeed.py").write_text("__version__ = '0.18.2'\n")
    (tmp_path / "deepspeed-0.18.2.dist-info").mkdir()
    (tmp_path / "deepspeed-0.18.2.dist-info/METADATA").write_text("Name: deepspeed\nVersion: 0.18.2\n")
    page = doctor(PYTHONPATH=str(tmp_path))
    assert page.returncode == 1
    found = rows(page)
    assert [topic for topic, status in found.items() if status == "FAIL"][:3] == [
        "deepspeed",
        "activation hook",
        "accelerator",
    ]
    assert "0.18.2; must be 0.18.5 or later" in page.output
    assert "-> pip install deepspeed==0.19.8" in page.output
    assert "deep_opt_states cannot be activated: RuntimeError: broken on purpose" in page.output
