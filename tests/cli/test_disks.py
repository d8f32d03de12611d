"""Test plans for machines with disks, and the rates that ``profile --nvme`` measures."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from deep_opt_states.device import state_file
from deep_opt_states.profiler import disk
from deep_opt_states.profiler.disk import doubts, measure_disks, measure_quantities
from deep_opt_states.profiler.probes import ProbeError
from deep_opt_states.profiler.ranks import Ranks
from perf_model.__main__ import main
from perf_model.prediction.hardware import DISK_QUANTITIES
from tests.launch import REPOSITORY
from tests.model.profiles import RATES, profile

DESKTOP = ["plan", "--profile", "rtx4090", "--host-memory-gb", "64", "--model", "Qwen2.5-7B", "--offload-param"]


def planned(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main([*DESKTOP, *options]) == 0
    return capsys.readouterr().out


def test_a_model_whose_states_do_not_fit_into_host_memory_is_planned_with_disks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(DESKTOP) != 0
    assert "keep states on disks: --nvme" in " ".join(capsys.readouterr().err.split())
    text = " ".join(planned(capsys, "--nvme", "6.5,5", "--units", "--explain").split())
    assert "6.5 GB/s read, 5 GB/s written" in text
    assert "cpu, on disk" in text
    assert "parameters of cpu units, disk in use for" in text
    assert "(limited by disk)" in text
    assert '"device": "nvme"' in text


def test_the_documented_desktop_has_the_documented_figures(capsys: pytest.CaptureFixture[str]) -> None:
    page = " ".join((REPOSITORY / "docs" / "planning.md").read_text().split())
    fp32, bf16 = page.split("The answer is ")[1].split("All of this is predicted")[0].split("With `--states bf16`")
    for states, sentences in (("fp32", fp32), ("bf16", bf16)):
        printed = " ".join(planned(capsys, "--nvme", "6.5,5", "--accumulation", "16", "--states", states).split())
        figures = re.findall(r"\d+ (?:s|GB)\b", sentences)
        assert len(figures) >= 3
        assert [figure for figure in figures if figure not in printed] == []


def test_more_host_memory_and_faster_disks_shorten_the_iteration(capsys: pytest.CaptureFixture[str]) -> None:
    def found(*options: str) -> tuple[float, float, int]:
        printed = json.loads(planned(capsys, "--json", *options))
        on_disk = sum(unit["numel"] for unit in printed["units"] if unit["on_disk"])
        stock_s = printed["baselines"]["stock"]["iteration_s"]
        return printed["predicted"]["iteration_s"], stock_s, on_disk

    slow, fast, full_duplex, more_memory = (
        found(*options.split())
        for options in ("--nvme 3,2", "--nvme 6,5", "--nvme 6,5,11", "--nvme 3,2 --host-memory-gb 96")
    )
    assert slow[0] > fast[0] > full_duplex[0]
    assert more_memory[0] < slow[0]
    assert more_memory[2] < slow[2] == fast[2]
    assert slow[0] < slow[1] > fast[1] > fast[0], "stock reads and writes all states and gradients"


@pytest.mark.parametrize("rates", ["6.5", "6,5,4,3", "0,1", "six,5"])
def test_wrong_rates_of_disks_are_refused(rates: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*DESKTOP, "--nvme", rates])
    assert "rates" in capsys.readouterr().err


def test_the_rates_of_a_profile_with_disks_are_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "profile.json"
    rates = {"matmul_flops_per_s": 3e14, **dict.fromkeys(DISK_QUANTITIES, 3e9)}
    path.write_text(profile({**RATES, **rates}).to_json())
    options = ["plan", "--profile", str(path), "--host-memory-gb", "64", "--model", "7B"]
    assert main(options) == 0
    assert "3 GB/s read, 3 GB/s written" in capsys.readouterr().out


def test_disks_are_measured_with_the_blocks_and_the_io_of_training(tmp_path: Path) -> None:
    with mock.patch.multiple(disk, BLOCK_BYTES=2**16, NUM_BLOCKS=2, REPETITIONS=3):
        both_folders = measure_disks([tmp_path, tmp_path])
        found = measure_quantities(Ranks(), [tmp_path])
    assert min(both_folders) > 0
    assert found.keys() == DISK_QUANTITIES.keys()
    assert all(len(measurement.samples) == 3 and min(measurement.samples) > 0 for measurement in found.values())
    with pytest.raises(ProbeError, match="nvme_path or nvme_paths: must be folders in which files can be created"):
        measure_quantities(Ranks(), [tmp_path / "none"])
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_direct_io_or_without_a_disk_is_named(tmp_path: Path) -> None:
    assert doubts([tmp_path]) == []
    assert "/dev/shm is on tmpfs: memory" in doubts([Path("/dev/shm")])[0]
    original = os.open

    def refuse(path: object, flags: int, *args: object, **kwargs: object) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "EINVAL")
        descriptor: int = original(path, flags, *args, **kwargs)  # type: ignore[arg-type]
        return descriptor

    with mock.patch.object(os, "open", refuse):
        assert "has no direct I/O" in doubts([tmp_path])[0]
    # Linux keeps direct I/O and mappings coherent on local file systems only.
    for kind in ("nfs4", "fuse.sshfs", "lustre"):
        with mock.patch.object(state_file, "file_system", lambda folder, kind=kind: kind):
            assert "has no direct I/O" in doubts([tmp_path])[0]


def test_the_block_of_a_plan_for_a_limited_host_memory_repeats_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    def block(*options: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(planned(capsys, "--json", *options))["deepspeed_config"]
        return dict(found["deep_optimizer_states"])

    limits = [block("--nvme", "6.5,5", "--host-memory-gb", limit)["host_memory_gb"] for limit in ("64", "96")]
    assert limits[1] - limits[0] == pytest.approx(32)
    assert limits[0] < 64, "the system and the process are not left to the optimizer"
    assert "host_memory_gb" not in block("--host-memory-gb", "300")
