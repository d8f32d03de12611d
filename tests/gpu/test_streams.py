"""Test the streams of an update on a GPU: they overlap, and the host does not block. Profile this machine."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path

import pytest
import torch

from deep_opt_states.device.cuda import CudaDevice
from deep_opt_states.profiler.ranks import collective
from perf_model.prediction.hardware import HardwareProfile
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan, place_all
from perf_model.schedule.workload import Workload
from tests.gpu.parts import seconds_left
from tests.gpu.updates import TrainingOnGpu, random_model
from tests.launch import REPOSITORY
from tests.runtime.moving import Model, random_iterations, train_serially
from tests.runtime.plain_adam import adam_step
from tests.runtime.random_states import run_update, same

Interval = tuple[float, float]


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


def test_copies_in_both_directions_and_kernels_overlap(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    model = Model(numels=(4_000_000,) * 10, persistent=[], grad_dtype=torch.bfloat16)
    workload = Workload.from_numels(list(model.numels))
    plan = UpdatePlan(workload=workload, placements=place_all(workload, Placement.STREAMED), num_slots=3)
    training = TrainingOnGpu(model, plan)
    training.backward(0)
    run_update(training.executor, [adam_step(1)] * 10)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run_update(training.executor, [adam_step(2)] * 10)
    training.end()
    profile.export_chrome_trace(str(trace))
    lanes = intervals(json.loads(trace.read_text())["traceEvents"])
    assert len(lanes["kernel"]) == len(plan.placements)
    assert min(len(lanes["h2d"]), len(lanes["d2h"])) >= 3 * len(plan.placements)
    found_s = {(one, other): overlap_s(lanes[one], lanes[other]) for one, other in combinations(lanes, 2)}
    assert found_s["h2d", "d2h"] > 0
    # A kernel takes a thirtieth of the time of a copy: one direction may be idle when it starts, but not both.
    assert found_s["h2d", "kernel"] + found_s["d2h", "kernel"] > 0


def intervals(events: Sequence[dict]) -> dict[str, list[Interval]]:  # type: ignore[type-arg]
    # An event belongs to a lane by its category and by a word in its name.
    kinds = {"h2d": ("gpu_memcpy", "HtoD"), "d2h": ("gpu_memcpy", "DtoH"), "kernel": ("kernel", "update")}
    lanes: dict[str, list[Interval]] = {lane: [] for lane in kinds}
    for event in events:
        for lane, (category, word) in kinds.items():
            if event.get("cat") == category and word in event["name"]:
                begin_s = float(event["ts"]) / 1e6
                lanes[lane].append((begin_s, begin_s + float(event["dur"]) / 1e6))
    return lanes


def overlap_s(one: Sequence[Interval], other: Sequence[Interval]) -> float:
    """Return the seconds in which both lanes work. The intervals of a lane must not overlap."""
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in one for b in other)


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


def test_collectives_over_nccl_are_measured_for_the_profile(tmp_path: Path) -> None:
    """Check the probes with one rank, since the machine may have one GPU. One rank passes on no bytes."""
    torch.distributed.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        world = torch.distributed.group.WORLD
        assert world is not None
        for reduces in (False, True):
            assert collective(CudaDevice(0), world, 2**26, "rate", reduces=reduces)() == {"rate": 0.0}
    finally:
        torch.distributed.destroy_process_group()
