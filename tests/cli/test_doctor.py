"""Test ``deep-opt-states doctor``: it finds each condition that keeps training from starting, and names a remedy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from torch.utils.file_baton import FileBaton

from deep_opt_states import doctor
from deep_opt_states.cli import doctor_command
from deep_opt_states.cli.main import main
from deep_opt_states.doctor import Extension, Finding, Status, describe_eager_updates
from deep_opt_states.host import machine as host
from tests.launch import REPOSITORY, Finished, environment

FOLDER = Path("/cache/cpu_adam")

BUILT, NOT_BUILT, PREBUILT = Extension(FOLDER, True), Extension(FOLDER, False), Extension(None, True)

LOCK = FOLDER / "lock"

FAILS: dict[str, Callable[[], Finding]] = {
    "old torch": lambda: doctor.check_package(Requirement("torch>=2.10"), "2.9.1+cu128"),
    "no wrapt": lambda: doctor.check_package(Requirement("wrapt"), None),
    "no deepspeed": lambda: doctor.check_deepspeed(None, None),
    "other deepspeed": lambda: doctor.check_deepspeed("0.17.5", None),
    "broken deepspeed": lambda: doctor.check_deepspeed("0.19.8", ImportError("no [hjson]")),
    "no supported accelerator": lambda: doctor.check_accelerator("xpu", 8, [], None),
    "no GPU": lambda: doctor.check_accelerator("cuda", 0, [], None),
    "autoload off": lambda: doctor.check_hook("0", has_entry_point=True, is_active=True),
    "no entry point": lambda: doctor.check_hook(None, has_entry_point=False, is_active=True),
    "hook not active": lambda: doctor.check_hook("1", has_entry_point=True, is_active=False),
    "no compiler": lambda: doctor.check_extension(NOT_BUILT, ["c++"], ours=False),
    "no ninja": lambda: doctor.check_extension(BUILT, ["ninja"], ours=False),
    "left by a killed build": lambda: doctor.check_locks({LOCK: [], FOLDER / "other/lock": [7]}),
}

WARNS: dict[str, Callable[[], Finding]] = {
    "deepspeed that was not tested": lambda: doctor.check_deepspeed("0.19.9", None),
    "cpu by accident": lambda: doctor.check_accelerator("cpu", 1, [], None),
    "switched off": lambda: doctor.check_switch("0"),
    "switch without meaning": lambda: doctor.check_switch("false"),
    "memlock": lambda: doctor.check_memlock(8 * 2**20, has_cuda=True),
    "one hardware queue": lambda: doctor.check_connections("1", has_cuda=True),
    "few hardware queues": lambda: doctor.check_connections("4", has_cuda=True),
    "not a number of hardware queues": lambda: doctor.check_connections("all", has_cuda=True),
    "no triton": lambda: doctor.check_triton(None, has_cuda=True),
    "not built yet": lambda: doctor.check_extension(NOT_BUILT, [], ours=False),
    "own kernel is not built": lambda: doctor.check_extension(NOT_BUILT, [], ours=True),
    "own kernel cannot be built": lambda: doctor.check_extension(NOT_BUILT, ["c++"], ours=True),
    "own kernel cannot be loaded": lambda: doctor.check_extension(BUILT, ["ninja"], ours=True),
    "being built": lambda: doctor.check_locks({LOCK: [7]}),
}

GPUS = [("NVIDIA H100", 85 * 10**9)] * 2

OKS: dict[str, tuple[Callable[[], Finding], str]] = {
    "torch": (lambda: doctor.check_package(Requirement("torch>=2.10"), "2.13.0+cpu"), "2.13.0+cpu"),
    "deepspeed": (lambda: doctor.check_deepspeed("0.19.8+abc", None), "0.19.8+abc"),
    "cpu": (lambda: doctor.check_accelerator("cpu", 1, [], "cpu"), "cpu, 1 device"),
    "cuda": (lambda: doctor.check_accelerator("cuda", 2, GPUS, None), "NVIDIA H100 (85.0 GB), NVIDIA H100 (85.0 GB)"),
    "hook": (lambda: doctor.check_hook(None, has_entry_point=True, is_active=True), "active"),
    "switch": (lambda: doctor.check_switch(None), "unset"),
    "memlock": (lambda: doctor.check_memlock(None, has_cuda=True), "unlimited"),
    "no GPU for memlock": (lambda: doctor.check_memlock(8 * 2**20, has_cuda=False), "nothing is pinned"),
    "no CUDA_DEVICE_MAX_CONNECTIONS": (lambda: doctor.check_connections(None, has_cuda=True), "unset"),
    "as many hardware queues as by default": (
        lambda: doctor.check_connections("8", has_cuda=True),
        "8 hardware queues",
    ),
    "hardware queues": (lambda: doctor.check_connections("32", has_cuda=True), "32 hardware queues"),
    "no GPU for hardware queues": (lambda: doctor.check_connections("1", has_cuda=False), "1; a GPU has 8"),
    "triton": (lambda: doctor.check_triton("3.6.0", has_cuda=True), "3.6.0"),
    "no GPU for triton": (lambda: doctor.check_triton(None, has_cuda=False), "not installed; only GPUs need it"),
    "prebuilt": (lambda: doctor.check_extension(PREBUILT, ["c++", "ninja"], ours=False), "prebuilt"),
    "built": (lambda: doctor.check_extension(BUILT, ["c++"], ours=False), f"built in {FOLDER}"),
    "no locks": (lambda: doctor.check_locks({}), "none"),
}


def page_of(finding: Finding, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    monkeypatch.setattr(doctor_command, "examine", lambda environ: {"topic": finding})
    monkeypatch.setenv("COLUMNS", "300")
    return main(["doctor"]), capsys.readouterr().out


@pytest.mark.parametrize("check", FAILS.values(), ids=FAILS)
def test_a_condition_that_keeps_training_from_starting_fails(
    check: Callable[[], Finding], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finding = check()
    code, page = page_of(finding, monkeypatch, capsys)
    assert (finding.status, code) == (Status.FAIL, 1)
    assert page.splitlines()[0].split() == f"FAIL topic {finding.found}".split()
    assert f"-> {finding.remedy}" in page
    assert "FAIL: topic;" in page.splitlines()[-1]


@pytest.mark.parametrize("check", WARNS.values(), ids=WARNS)
def test_a_condition_that_only_costs_time_warns(
    check: Callable[[], Finding], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finding = check()
    code, page = page_of(finding, monkeypatch, capsys)
    assert (finding.status, code) == (Status.WARN, 0)
    assert page.splitlines()[0].startswith("WARN")
    assert f"-> {finding.remedy}" in page


@pytest.mark.parametrize(("check", "found"), OKS.values(), ids=OKS)
def test_a_good_condition_is_shown_as_ok(check: Callable[[], Finding], found: str) -> None:
    finding = check()
    assert finding.status is Status.OK
    assert found in finding.found


def test_requirements_come_from_our_own_metadata() -> None:
    required = {requirement.name: str(requirement.specifier) for requirement in doctor.requirements()}
    assert {"deepspeed", "psutil", "rich", "wrapt"} < set(required)
    assert "pytest" not in required
    assert required["torch"] == ">=2.10"


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


def run_doctor(*arguments: str, **changes: str) -> Finished:
    """Run the installed command on this machine."""
    command = [str(Path(sys.executable).with_name("deep-opt-states")), "doctor", *arguments]
    env = environment(COLUMNS="300", **changes)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    return Finished(done.returncode, done.stdout)


def rows(page: Finished) -> dict[str, str]:
    """Return the status of each topic."""
    topics = ("deepspeed", "activation hook", "accelerator", "cpu_adam", "C++ Adam kernel", "locks of builds")
    lines = [line.split(maxsplit=1) for line in page.output.splitlines() if line.startswith(("OK", "WARN", "FAIL "))]
    return {topic: status for status, row in lines for topic in topics if row.startswith(topic + " ")}


def test_this_machine_can_train(tmp_path: Path) -> None:
    page = run_doctor(TORCH_EXTENSIONS_DIR=str(tmp_path))
    assert page.returncode == 0, page.output
    found = rows(page)
    # The doctor looks into the empty folder of this test, unless DeepSpeed's op is prebuilt.
    assert found.pop("cpu_adam") in ("OK", "WARN")
    assert found.pop("C++ Adam kernel") == "WARN"
    assert found == dict.fromkeys(("deepspeed", "activation hook", "accelerator", "locks of builds"), "OK")
    for topic in ("torch", "wrapt", "memlock limit", "CUDA_DEVICE_MAX_CONNECTIONS"):
        assert topic in page.output
    assert not [path for path in tmp_path.rglob("*") if path.is_file()], "the doctor must not build anything"
    assert "Training can start." in page.output


def test_a_broken_deepspeed_and_a_disabled_autoload_fail(tmp_path: Path) -> None:
    (tmp_path / "deepspeed.py").write_text("raise ImportError('broken on purpose')\n")
    page = run_doctor(
        PYTHONPATH=f"{tmp_path}:{REPOSITORY}", TORCH_DEVICE_BACKEND_AUTOLOAD="0", CXX="no-such-compiler", PATH=""
    )
    assert page.returncode == 1
    found = rows(page)
    for topic in ("deepspeed", "activation hook", "accelerator", "cpu_adam"):
        assert found[topic] == "FAIL", page.output
    assert "ImportError: broken on purpose" in page.output
    assert "-> Unset TORCH_DEVICE_BACKEND_AUTOLOAD, or import deep_opt_states" in page.output


def test_an_unsupported_deepspeed_and_a_broken_wrapt_fail(tmp_path: Path) -> None:
    (tmp_path / "wrapt.py").write_text("raise RuntimeError('broken on purpose')\n")
    (tmp_path / "deepspeed.py").write_text("__version__ = '0.17.5'\n")
    (tmp_path / "deepspeed-0.17.5.dist-info").mkdir()
    (tmp_path / "deepspeed-0.17.5.dist-info/METADATA").write_text("Name: deepspeed\nVersion: 0.17.5\n")
    page = run_doctor(PYTHONPATH=f"{tmp_path}:{REPOSITORY}")
    assert page.returncode == 1
    found = rows(page)
    for topic in ("deepspeed", "activation hook", "accelerator"):
        assert found[topic] == "FAIL", page.output
    assert "0.17.5; must be 0.17.6 or later" in page.output
    assert "-> pip install deepspeed==0.19.8" in page.output
    assert "found that it fails: RuntimeError: broken on purpose" in page.output


def test_the_lock_of_a_killed_build_is_told_from_that_of_a_running_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check it with PyTorch's own lock, in the folder of another extension."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "utils").mkdir()
    baton = FileBaton(str(tmp_path / "utils/lock"))
    assert baton.try_acquire()
    lock = tmp_path / "utils/lock"
    assert doctor._locks() == {lock: [os.getpid()]}
    killed = f"from torch.utils.file_baton import FileBaton; FileBaton('{tmp_path}/utils/.ninja_lock').try_acquire()"
    subprocess.run([sys.executable, "-c", killed], check=True)
    found = doctor._locks()
    assert found == {lock: [os.getpid()], tmp_path / "utils/.ninja_lock": []}
    finding = doctor.check_locks(found)
    assert finding.status is Status.FAIL
    assert finding.remedy.endswith(f"rm {tmp_path}/utils/.ninja_lock")
    baton.release()
    (tmp_path / "utils/.ninja_lock").unlink()
    assert doctor._locks() == {}


# A config

STAGE_3 = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}, "bf16": {"enabled": True}}

REFUSED: dict[str, tuple[object, str, str]] = {
    "no block": (STAGE_3, "found no such block: stock DeepSpeed trains", 'Add "deep_optimizer_states": {}.'),
    "misspelled": ({**STAGE_3, "deep_opt_states": {}}, "deep_opt_states: has no effect", "Correct the name."),
    "misplaced": (
        {"zero_optimization": {"stage": 3, "deep_optimizer_states": {}}},
        'inside "zero_optim',
        "Move it out",
    ),
    "key": ({**STAGE_3, "deep_optimizer_states": {"plcement": "cpu"}}, "plcement: is not a known key", "Did you mean"),
    "stage": ({"deep_optimizer_states": {}, "zero_optimization": {"stage": 2}}, "stage: must be 3", 'set "stage": 3'),
    "profile": ({**STAGE_3, "deep_optimizer_states": {"profile": "/no/file"}}, "No such file", "Write a profile"),
    "DeepSpeed's key": (
        {"zero_optimization": {"stge": 3}, "deep_optimizer_states": {}},
        "DeepSpeed must accept the config",
        "Correct this key.",
    ),
    "a list": ([1], "with another value", "Correct the file."),
}


@pytest.fixture
def check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str | None], tuple[int, str]]:
    """Return a function that checks a text as a config, and returns the exit code and the page."""
    monkeypatch.setenv("COLUMNS", "1000")
    path = tmp_path / "ds.json"

    def run(text: str | None) -> tuple[int, str]:
        if text is not None:
            path.write_text(text)
        return main(["doctor", "--config", str(path)]), capsys.readouterr().out

    return run


@pytest.mark.parametrize(("config", "found", "remedy"), REFUSED.values(), ids=REFUSED)
def test_a_config_that_would_not_train_with_the_plugin_fails(
    check: Callable[[str | None], tuple[int, str]], config: object, found: str, remedy: str
) -> None:
    code, page = check(json.dumps(config))
    assert code == 1
    assert found in page
    assert remedy in page
    assert "FAIL: ds.json" in page.splitlines()[-1]


@pytest.mark.parametrize("text", [None, '{"a": ', '{"a": 1, "a": 2}'])
def test_a_config_that_cannot_be_read_fails(check: Callable[[str | None], tuple[int, str]], text: str | None) -> None:
    code, page = check(text)
    assert code == 1
    assert "A DeepSpeed config must be a file with a JSON object, found" in page
    assert "-> Correct the file, or give the path of another one." in page


def test_each_broken_rule_of_a_config_has_a_remedy(check: Callable[[str | None], tuple[int, str]]) -> None:
    code, page = check(json.dumps({**STAGE_3, "deep_optimizer_states": {"unit_size": -1, "plcement": "cpu"}}))
    assert code == 1
    assert page.count("FAIL  ds.json (") == page.count("-> ") == 2


def test_a_config_of_trainer_is_accepted_whatever_the_number_of_ranks(
    check: Callable[[str | None], tuple[int, str]],
) -> None:
    """Check values that Trainer fills in, a batch of 64 on one rank, and a comment, which DeepSpeed accepts."""
    config = {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        **STAGE_3,
        "bf16": {"enabled": "auto"},
        "deep_optimizer_states": {"placement": "cpu"},
    }
    code, page = check("# a comment\n" + json.dumps(config))
    assert code == 0, page
    assert "accepted, with placement 'cpu'" in page


def test_a_config_that_is_switched_off_warns(check: Callable[[str | None], tuple[int, str]]) -> None:
    code, page = check(json.dumps({"deep_optimizer_states": {"enabled": False}}))
    assert code == 0
    assert "WARN  ds.json" in page
    assert "stock DeepSpeed trains" in page


def test_the_memory_for_eager_updates_is_half_of_what_is_free() -> None:
    found = describe_eager_updates(48 * 10**9)
    assert found.status is Status.OK
    assert found.found.endswith("at most 24.0 GB for 2.00 B parameters")
