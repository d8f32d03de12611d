"""Test the streams of an update on a GPU, for which the host does not block, and profile this machine."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from deep_opt_states.device.cuda import CudaDevice
from perf_model.prediction.hardware import HardwareProfile
from tests.gpu.parts import seconds_left
from tests.gpu.updates import TrainingOnGpu, random_model
from tests.launch import REPOSITORY
from tests.runtime.moving import random_iterations, train_serially
from tests.runtime.random_states import same


@contextmanager
def no_implicit_synchronization() -> Iterator[None]:
    """Make PyTorch raise if it would wait for the GPU implicitly, such as for a copy from pageable memory."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_an_implicit_synchronization_is_detected() -> None:
    one = torch.ones(1, device="cuda")
    with pytest.raises(RuntimeError, match="synchronizing"), no_implicit_synchronization():
        one.item()


def test_streams_of_updates_have_priority() -> None:
    assert CudaDevice(0).stream()._stream.priority < torch.cuda.current_stream().priority


@pytest.mark.parametrize("seed", range(200, 206))
def test_an_update_is_issued_without_implicit_synchronization(seed: int) -> None:
    chance = random.Random(seed)
    model = random_model(chance)
    iterations = random_iterations(chance, model, 4, moves=False)
    training = TrainingOnGpu(model, iterations[0].plan)
    for name in ("prefetch", "begin", "advance", "publish"):
        setattr(training.executor, name, no_implicit_synchronization()(getattr(training.executor, name)))
    assert same(training.train(iterations), train_serially(model, iterations)), f"{model}\n{iterations}"


def test_an_event_before_the_origin_is_at_a_negative_second() -> None:
    """Check this, because a timeline counts from the beginning of the update, and prefetches begin before that."""
    device = CudaDevice(torch.cuda.current_device())
    stream, early, late = device.current_stream(), device.event(), device.event()
    stream.record(early)
    torch.cuda._sleep(20_000_000)
    stream.record(late)
    late.synchronize()
    between_s = late.seconds_after(early)
    assert between_s > 0
    assert early.seconds_after(late) == pytest.approx(-between_s, rel=1e-3)


def test_a_quick_profile_measures_every_quantity_of_the_gpu() -> None:
    path = Path(os.environ.get("OUT") or REPOSITORY / ".cache") / "profile.json"
    done = subprocess.run(
        [sys.executable, "-m", "deep_opt_states.cli", "profile", "--quick", "--output", str(path)],
        cwd=REPOSITORY,
        env={**os.environ, "DS_ACCELERATOR": "cuda"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds_left(),
    )
    assert done.returncode == 0, done.stdout[-5000:]
    profile = HardwareProfile.from_json(path.read_text())
    for name in ("h2d_bytes_per_s", "d2h_bytes_per_s", "both_bytes_per_s", "gpu_adam_params_per_s"):
        assert profile.measurements[name].waived is None, name
