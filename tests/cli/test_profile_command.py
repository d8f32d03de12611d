"""Test ``deep-opt-states profile``, as a program on this machine, alone and under torchrun."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from deepspeed.accelerator import get_accelerator

from deep_opt_states.cli import profile_command
from deep_opt_states.cli.main import main
from deep_opt_states.cli.profile_command import check_output
from perf_model.prediction.hardware import QUANTITIES, REQUIRED, HardwareProfile, Measurement, ProfileError, Provenance
from tests.launch import environment, free_port

HOST = {
    "copy_latency_s",
    "cpu_adam_params_per_s",
    "stock_cpu_adam_params_per_s",
    "dram_update_bytes_per_s",
    "dram_copy_bytes_per_s",
    "matmul_flops_per_s",
}

IN_NODE = {"all_gather_bytes_per_s", "reduce_scatter_bytes_per_s"}


def installed(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def finished(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=environment(COLUMNS="80"), capture_output=True, text=True, timeout=120)


def check(output: Path, page: str, ranks: int) -> None:
    written = HardwareProfile.read(output)
    measured = HOST if ranks == 1 else HOST | IN_NODE
    assert {name for name, found in written.measurements.items() if found.samples} == measured
    assert set(written.measurements) == set(QUANTITIES)
    assert (written.provenance.ranks, written.provenance.source) == (ranks, "measured")
    rows = {line.split()[0]: line.split()[1] for line in page.splitlines() if line.split()[:1]}
    assert {name for name in QUANTITIES if rows[name] == "WAIVED"} == set(QUANTITIES) - measured
    why_not_across = "one rank" if ranks == 1 else "one node"
    assert page.count(f"(2) {why_not_across}\n") == 1
    assert page.count("(1) no accelerator: training here runs on the CPU") == 1
    assert f"Written: {output}" in page


@pytest.mark.thorough
def test_the_profile_of_this_machine_is_written_and_printed(tmp_path: Path) -> None:
    output = tmp_path / "profile.json"
    done = finished([installed("deep-opt-states"), "profile", "--quick", "--output", str(output)])
    assert done.returncode == 0, done.stderr
    check(output, done.stdout, ranks=1)
    assert [path.name for path in tmp_path.iterdir()] == ["profile.json"]


@pytest.mark.thorough
def test_two_ranks_under_torchrun_write_one_profile(tmp_path: Path) -> None:
    output = tmp_path / "profile.json"
    launcher = [installed("torchrun"), "--nproc-per-node=2", f"--master-port={free_port()}"]
    done = finished([*launcher, "-m", "deep_opt_states.cli", "profile", "--quick", "--output", str(output)])
    assert done.returncode == 0, done.stderr
    check(output, done.stdout, ranks=2)
    assert done.stdout.count("2 ranks together on each node; each figure is of the slowest rank") == 1, "rank 0 prints"


@pytest.mark.parametrize(
    ("path", "found"),
    [("nowhere/profile.json", "found no folder"), ("folder", "which is not a regular file")],
)
def test_an_output_that_cannot_be_written_is_refused_before_measuring(
    path: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(profile_command, "measure", None)
    (tmp_path / "folder").mkdir()
    assert main(["profile", "--output", str(tmp_path / path)]) == 1
    message = capsys.readouterr().err
    assert message.startswith(
        "--output: must be a file, to be written or replaced, in a folder that can be written; found"
    )
    assert found in message
    assert "Give another path" in message


def test_an_output_on_a_read_only_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(path: Path, text: str) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(profile_command, "replace_file", read_only)
    with pytest.raises(ProfileError, match="Read-only file system"):
        check_output(tmp_path / "profile.json")


@pytest.fixture(autouse=True)
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train no layers, which takes most of a minute."""
    monkeypatch.setattr(profile_command, "measure_training", lambda ranks: {})


@pytest.mark.parametrize("is_quick", [False, True])
def test_only_a_full_profile_trains_a_few_layers(
    is_quick: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = {name: Measurement(samples=(1e9,)) for name in REQUIRED}
    found = HardwareProfile(name="here", provenance=Provenance(source="measured"), measurements=rates)
    step = {"module_forward_s": Measurement(samples=(6e-4,))}
    monkeypatch.setattr(profile_command, "measure", lambda *arguments, **options: found)
    monkeypatch.setattr(profile_command, "measure_training", lambda ranks: step)
    assert main(["profile", "--output", str(tmp_path / "profile.json"), *(["--quick"] if is_quick else [])]) == 0
    written = HardwareProfile.read(tmp_path / "profile.json").measurements
    assert written == (rates if is_quick else rates | step)


def make_measurement_fail(monkeypatch: pytest.MonkeyPatch, message: str) -> None:
    def fail(*arguments: object, **options: object) -> HardwareProfile:
        raise ProfileError(message)

    monkeypatch.setattr(profile_command, "measure", fail)


def test_an_existing_profile_is_kept_if_the_measurement_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_measurement_fail(monkeypatch, "no [kernel]: rule, value.\nRemedy.")
    output = tmp_path / "profile.json"
    output.write_text("old")
    assert main(["profile", "--output", str(output)]) == 1
    assert "no [kernel]: rule, value.\nRemedy." in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["profile.json"]
    assert output.read_text() == "old"


def test_only_rank_0_writes_and_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check that rank 1 does not need the folder: it may run on a node that does not have it."""
    names = REQUIRED
    profile_of_all = HardwareProfile(
        name="here",
        provenance=Provenance(source="measured"),
        measurements={name: Measurement(samples=(1e9,)) for name in names},
    )
    monkeypatch.setattr(profile_command, "measure", lambda *arguments, **options: profile_of_all)
    monkeypatch.setenv("RANK", "1")
    assert main(["profile", "--output", str(tmp_path / "nowhere/profile.json")]) == 0
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("RANK", "0")
    assert main(["profile", "--output", str(tmp_path / "profile.json")]) == 0
    assert HardwareProfile.read(tmp_path / "profile.json") == profile_of_all


def test_a_rank_without_a_gpu_prints_why_although_rank_0_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    accelerator = get_accelerator()
    monkeypatch.setattr(accelerator, "device_name", lambda: "cuda")
    monkeypatch.setattr(accelerator, "device_count", lambda: 1)
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert main(["profile", "--output", str(tmp_path / "profile.json")]) == 1
    assert "LOCAL_RANK: must be less than the number of GPUs, 1; found 1." in capsys.readouterr().err


def test_an_error_of_all_ranks_is_printed_by_rank_0_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_measurement_fail(monkeypatch, "no kernel.")
    monkeypatch.setenv("RANK", "1")
    assert main(["profile", "--output", str(tmp_path / "profile.json")]) == 1
    assert "no kernel." not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("matmul_flops_per_s", "printed"),
    [(612e12, "612 612 to 612 TFLOP/s"), (0.71e9, "0.71 0.71 to 0.71 GFLOP/s")],
)
def test_quantities_are_printed_in_readable_units(
    matmul_flops_per_s: float,
    printed: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def measured(*arguments: object, **options: object) -> HardwareProfile:
        samples = {
            "h2d_bytes_per_s": (24.5e9, 25.5e9, 24.9e9),
            "copy_latency_s": (9.5e-6, 10.5e-6, 9.75e-6),
            "cpu_adam_params_per_s": (1.2345e9,) * 3,
            "stock_cpu_adam_params_per_s": (0.5e9,),
            "dram_update_bytes_per_s": (205e9,) * 3,
            "matmul_flops_per_s": (matmul_flops_per_s,) * 3,
        }
        return HardwareProfile(
            name="here",
            provenance=Provenance(source="measured"),
            measurements={
                **{name: Measurement(samples=values) for name, values in samples.items()},
                "d2h_bytes_per_s": Measurement(waived="[reason]"),
            },
        )

    monkeypatch.setattr(profile_command, "measure", measured)
    assert main(["profile", "--output", str(tmp_path / "profile.json")]) == 0
    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for row in (
        "h2d_bytes_per_s 24.9 24.5 to 25.5 GB/s",
        "copy_latency_s 9.75 9.5 to 10.5 us",
        "cpu_adam_params_per_s 1,234 1,234 to 1,234 M params/s",
        "dram_update_bytes_per_s 205 205 to 205 GB/s",
        f"matmul_flops_per_s {printed}",
        "d2h_bytes_per_s WAIVED (1)",
        "(1) [reason]",
    ):
        assert row in rows, rows
