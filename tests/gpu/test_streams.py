"""Test the streams of an update on a GPU: they overlap, the host does not block, and events give their order."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path

import pytest
import torch

from benchmarks.harness.rows import spread
from deep_opt_states.device.cuda import CHUNK_BYTES, CudaDevice
from deep_opt_states.runtime.executor import Executor
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan, place_all
from perf_model.schedule.workload import Workload
from tests.gpu.figures import figure
from tests.gpu.kernels import triton_adam
from tests.gpu.small_copies import DIRECTIONS, SmallCopies
from tests.gpu.updates import (
    cuda_states,
    deferred,
    host_adam,
    late_backward,
    random_plan,
    serial_of_deferred,
    steps_for,
)
from tests.runtime.random_states import same
from tests.runtime.whole_update import run_update

Interval = tuple[float, float]
LARGE_BYTES = 2**28
"""The bytes of a state of 64 million parameters."""


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


@pytest.mark.parametrize("seed", range(200, 206))
def test_an_update_is_issued_without_implicit_synchronization(seed: int) -> None:
    plan = random_plan(seed)
    expected = serial_of_deferred(plan, torch.bfloat16, torch.bfloat16, seed)
    found = deferred(plan, torch.bfloat16, torch.bfloat16, seed, issuing=no_implicit_synchronization)
    assert same(found, expected), str(plan.schedule)


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


@contextmanager
def streamed(count: int, numel: int, num_slots: int) -> Iterator[tuple[Executor, UpdatePlan]]:
    """Yield an executor of equal units, all of them streamed, after its first update; gradients are written."""
    workload = Workload.from_numels([numel] * count)
    plan = UpdatePlan(workload=workload, placements=place_all(workload, Placement.STREAMED), num_slots=num_slots)
    device = CudaDevice(torch.cuda.current_device())
    _, states = cuda_states(device, plan, plan, torch.bfloat16, torch.bfloat16, seed=0)
    kernel = triton_adam()
    kernel.compile([torch.bfloat16], [torch.bfloat16])
    executor = Executor(plan.schedule, states, device, host_adam(), kernel)
    try:
        late_backward(plan, states, 1)
        run_update(executor, steps_for(plan, 1)[0])
        yield executor, plan
    finally:
        executor.close()


def test_copies_in_both_directions_and_kernels_overlap(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    with streamed(count=10, numel=4_000_000, num_slots=3) as (executor, plan):
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            run_update(executor, steps_for(plan, 2)[1])
        profile.export_chrome_trace(str(trace))
    lanes = intervals(json.loads(trace.read_text())["traceEvents"])
    assert len(lanes["kernel"]) == len(plan.placements)
    assert min(len(lanes["h2d"]), len(lanes["d2h"])) >= 3 * len(plan.placements)
    found_s = {(one, other): overlap_s(lanes[one], lanes[other]) for one, other in combinations(lanes, 2)}
    for (one, other), seconds in found_s.items():
        figure(f"overlap in an update, {one} and {other}", seconds, "s")
    assert found_s["h2d", "d2h"] > 0
    # A kernel takes a thirtieth of the time of a copy: one direction may be idle when it starts, but not both.
    assert found_s["h2d", "kernel"] + found_s["d2h", "kernel"] > 0


def intervals(events: Sequence[dict]) -> dict[str, list[Interval]]:  # type: ignore[type-arg]
    """Return the intervals of each lane in seconds: the copies between host and GPU, and the Adam kernels."""
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


def test_the_latency_of_a_small_copy_beside_the_lanes_is_reported() -> None:
    """Report it with and without chunks: no documentation promises that another stream's copy may overtake a chunk."""
    bytes_per_s = {}
    for variant, chunk_bytes in {"copies in chunks": CHUNK_BYTES, "whole copies": sys.maxsize}.items():
        probe = SmallCopies(CudaDevice(torch.cuda.current_device(), chunk_bytes), LARGE_BYTES)
        for direction in DIRECTIONS:
            for condition, found_s in (
                ("alone", probe.alone_s(direction, 20)),
                ("beside the lanes", probe.beside_lanes_s(direction, 20)),
            ):
                for name, seconds in {**spread(found_s), "longest": max(found_s)}.items():
                    figure(f"latency of a 1 KB copy {condition}, {direction}, {variant}, {name}", seconds, "s")
            bytes_per_s[direction, variant] = probe.lane_bytes_per_s(direction)
    for direction in DIRECTIONS:
        cost = 1 - bytes_per_s[direction, "copies in chunks"] / bytes_per_s[direction, "whole copies"]
        figure(f"bandwidth that chunks cost, {direction}", cost, "share")
