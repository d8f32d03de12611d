"""Test the quick profile of this machine, and report its rate of the GPU's Adam next to the benchmark's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest
import torch

from benchmarks.adam import NUMEL, adam_gpu
from deep_opt_states.device.cuda import CudaDevice
from deep_opt_states.profiler.ranks import ProcessGroup, collective
from perf_model.prediction.hardware import HardwareProfile
from tests.gpu.figures import figure
from tests.gpu.time_left import seconds_left
from tests.launch import REPOSITORY

BENCHMARK_S = 8.0
"""The time for the benchmark, which runs after the profile."""


@pytest.fixture(scope="module")
def profile() -> HardwareProfile:
    path = Path(os.environ.get("OUT") or REPOSITORY / ".cache") / "profile.json"
    done = subprocess.run(
        [sys.executable, "-m", "deep_opt_states.cli", "profile", "--quick", "--output", str(path)],
        cwd=REPOSITORY,
        env={**os.environ, "DS_ACCELERATOR": "cuda"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=max(1.0, seconds_left() - BENCHMARK_S),
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return HardwareProfile.from_json(path.read_text())


def test_every_quantity_of_the_gpu_is_measured(profile: HardwareProfile) -> None:
    for name, measurement in profile.measurements.items():
        if measurement.waived is None:
            figure(name, measurement.median, "SI units")
        else:
            print(f"{name}: waived, {measurement.waived}")
    for name in ("h2d_bytes_per_s", "d2h_bytes_per_s", "both_bytes_per_s", "gpu_adam_params_per_s"):
        assert profile.measurements[name].waived is None, name


def test_collectives_over_nccl_are_measured(tmp_path: Path) -> None:
    """Check the probes with one rank, since the machine may have one GPU. One rank passes on no bytes."""
    torch.distributed.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        world = torch.distributed.group.WORLD
        assert world is not None
        group = ProcessGroup(world)
        for reduces in (False, True):
            assert collective(CudaDevice(0), group, 2**26, "rate", reduces=reduces)() == {"rate": 0.0}
    finally:
        torch.distributed.destroy_process_group()


def test_the_gpu_adam_rate_of_the_profile_is_reported_next_to_the_benchmark_s(profile: HardwareProfile) -> None:
    """Report both rates: a probe that timed Python's launches would find a quarter of the rate or less."""
    rows = list(adam_gpu.compare(NUMEL, torch.bfloat16, repetitions=5))
    (samples,) = (row.samples for row in rows if row.variant == "GPU, ours" and row.quantity == "update rate")
    rate, probed = median(samples), profile.measurements["gpu_adam_params_per_s"].median
    figure("GPU Adam, rate of the benchmark", rate, "parameters/s")
    figure("GPU Adam, rate of the profile", probed, "parameters/s")
    figure("GPU Adam, rate of the profile relative to the benchmark's", probed / rate, "1")
