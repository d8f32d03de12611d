"""Test ``measure``: every quantity is measured, or waived with the reason, whatever the device does."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from deep_opt_states.device.cpu import HostDevice
from deep_opt_states.device.kernels.library import KernelUnavailable
from deep_opt_states.host import machine
from deep_opt_states.profiler import cache
from deep_opt_states.profiler.cache import fingerprint
from deep_opt_states.profiler.peaks import peak_flops
from deep_opt_states.profiler.profile import (
    IMPLAUSIBLE,
    NO_ACCELERATOR,
    NO_GROUPS,
    Entry,
    ProbeEffort,
    describe,
    measure,
    noise_waivers,
)
from deep_opt_states.profiler.ranks import CollectiveGroups, Ranks
from perf_model.prediction.cost import CPU_ADAM, CostModel, Resource
from perf_model.prediction.hardware import LIMITS, QUANTITIES, REQUIRED, HardwareProfile, Measurement, ProfileError
from tests.model.profiles import profile
from tests.profiler.virtual import GroupOfTwo, LaunchedAdam, TimedAdam, VirtualDevice, kernels, virtual_clock
from tests.runtime.plain_adam import PlainAdam

SMALL = ProbeEffort(
    warm_ups=1,
    min_samples=5,
    max_samples=9,
    budget_s=0.01,
    update_numel=80_000,
    launch_numel=10_000,
    copy_bytes=2**20,
    matrix_size=64,
)

COLLECTIVES = {"all_gather_bytes_per_s", "reduce_scatter_bytes_per_s", "inter_node_bytes_per_s"}

THREADS = 3
"""Threads that update in training."""

TICK_S = 1e-4
"""The host's virtual clock advances by this much each time that it is read."""

UPDATE_S = 5e-4
"""The clock advances by this much in an update, including the reading that follows."""

COPY_LATENCY_S = 1e-6

IN_NODE_S, ACROSS_NODES_S = 4e-5, 7e-4
"""Seconds of a collective between two ranks of a node, or of two nodes."""

LAUNCH_S, KERNEL_S, PRODUCT_S = 6e-5, 2e-6, 2e-7
"""A launch on the accelerator takes the host longer than an update or a matrix product takes the accelerator."""


@pytest.fixture(autouse=True)
def _no_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the caches, so that the working sets need not be larger than them."""
    monkeypatch.setattr(machine, "last_level_cache_bytes", lambda: None)


@pytest.fixture
def by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept any speed: on a loaded machine, threads that wait for each other stop for milliseconds."""
    for name, quantity in QUANTITIES.items():
        monkeypatch.setitem(QUANTITIES, name, quantity._replace(low=0, high=math.inf))
    monkeypatch.setitem(LIMITS, "both_bytes_per_s", (LIMITS["both_bytes_per_s"][0], math.inf))


@pytest.fixture
def device() -> Iterator[VirtualDevice]:
    with virtual_clock(
        VirtualDevice(issue_s=COPY_LATENCY_S), tick_s=TICK_S, launch_s=LAUNCH_S, product_s=PRODUCT_S
    ) as device:
        yield device


SLAB_BYTES = 8 * (3 * 10_000 * 4 + 2 * 20_032)
"""The slab of 80,000 parameters in eight sub-groups; the 16-bit tensors are padded to whole cache lines."""


def virtual_profile(device: VirtualDevice, cores: int, monkeypatch: pytest.MonkeyPatch) -> HardwareProfile:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setattr(machine, "core_quota", lambda folders: None)
    plugin, stock = TimedAdam(device, UPDATE_S - TICK_S), TimedAdam(device, 1.5 * UPDATE_S - TICK_S)
    groups = CollectiveGroups(in_node=GroupOfTwo(device, IN_NODE_S), across_nodes=GroupOfTwo(device, ACROSS_NODES_S))
    with kernels(
        training_cpu_adam=lambda *_: plugin,
        stock_cpu_adam=lambda _: stock,
        training_gpu_adam=lambda: LaunchedAdam(device, launch_s=LAUNCH_S, kernel_s=KERNEL_S),
    ):
        return measure(device, Ranks(), SMALL, threads=THREADS, groups=groups)


@pytest.mark.promise("P5")
def test_every_quantity_is_exact_on_a_virtual_clock(device: VirtualDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = virtual_profile(device, 6, monkeypatch)
    assert {name: found.waived for name, found in profile.measurements.items()} == dict.fromkeys(QUANTITIES)
    copy_s = 2**20 / 1e10 + COPY_LATENCY_S
    for name, expected in {
        "h2d_bytes_per_s": 2**20 / copy_s,
        "d2h_bytes_per_s": 2**20 / copy_s,
        "both_bytes_per_s": 2 * 2**20 / copy_s,
        "pageable_h2d_bytes_per_s": 2**20 / copy_s,
        "copy_latency_s": 1024 / 1e10 + COPY_LATENCY_S,
        "cpu_adam_params_per_s": 10_000 / UPDATE_S,
        "stock_cpu_adam_params_per_s": 10_000 / (1.5 * UPDATE_S),
        "cpu_adam_beside_transfers_params_per_s": 10_000 / UPDATE_S,
        "both_beside_cpu_adam_bytes_per_s": 2 * 2**20 / copy_s,
        "dram_update_bytes_per_s": 2 * SLAB_BYTES / TICK_S,
        "dram_copy_bytes_per_s": SLAB_BYTES / TICK_S,
        "gpu_adam_params_per_s": 10_000 / KERNEL_S,
        "matmul_flops_per_s": 2 * 64**3 / PRODUCT_S,
        "all_gather_bytes_per_s": 2**19 / 2 / IN_NODE_S,
        "reduce_scatter_bytes_per_s": 2**19 / 2 / IN_NODE_S,
        "inter_node_bytes_per_s": 2**19 / 2 / ACROSS_NODES_S,
    }.items():
        assert profile.rate(name) == pytest.approx(expected, rel=1e-3), name
    assert HardwareProfile.from_json(profile.to_json()) == profile


@pytest.mark.usefixtures("by_the_clock")
def test_the_host_is_measured_without_an_accelerator() -> None:
    profile = measure(None, Ranks(), SMALL, threads=THREADS)
    waived = {name: found.waived for name, found in profile.measurements.items() if found.waived is not None}
    # The matrix product is the CPU's here.
    host = {*REQUIRED, *CPU_ADAM.values(), "copy_latency_s", "dram_copy_bytes_per_s", "matmul_flops_per_s"}
    assert waived == {
        name: NO_GROUPS.in_node if name in COLLECTIVES else NO_ACCELERATOR for name in QUANTITIES if name not in host
    }
    origin = profile.provenance
    assert (origin.source, origin.host, origin.ranks, origin.gpu) == ("measured", platform.node(), 1, "")
    assert (origin.cores, origin.torch, origin.deepspeed) == (THREADS, torch.__version__, "0.19.8")
    assert profile.gpu_memory_bytes is profile.gpu_peak_flops is None
    assert profile.host_memory_bytes == machine.memory().usable_bytes


PEAKS = {
    312: ("NVIDIA A100-SXM4-40GB", "NVIDIA A100 80GB PCIe"),
    989: ("NVIDIA H100 80GB HBM3", "NVIDIA H200"),
    756: ("NVIDIA H100 PCIe",),
    835: ("NVIDIA H100 NVL",),
    990: ("NVIDIA GH200 480GB",),
    362: ("NVIDIA L40S",),
    154.8: ("NVIDIA RTX A6000",),
    165.2: ("NVIDIA GeForce RTX 4090",),
    125: ("Tesla V100-SXM2-32GB",),
    112: ("Tesla V100-PCIE-16GB",),
    None: ("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "NVIDIA A10G", "Of tomorrow"),
}
"""Names of GPUs by their peak in TFLOP/s."""


@pytest.mark.parametrize(("name", "tera"), [(name, tera) for tera, names in PEAKS.items() for name in names])
def test_the_peak_of_a_gpu_is_looked_up_by_its_name(name: str, tera: float | None) -> None:
    assert peak_flops(name) == (None if tera is None else tera * 1e12)


def test_the_gpu_s_peak_is_in_its_profile(device: VirtualDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpu", lambda: machine.Gpu("NVIDIA H100 PCIe", 80 * 2**30))
    assert virtual_profile(device, 1, monkeypatch).gpu_peak_flops == 756e12


@pytest.mark.usefixtures("by_the_clock")
def test_progress_iterates_over_every_probe_to_the_end() -> None:
    done: list[str] = []

    def progress(entries: Collection[Entry]) -> Iterator[Entry]:
        assert len(entries) == 16
        for quantities, prepare in entries:
            yield quantities, prepare
            done.extend(quantities)

    measure(None, Ranks(), SMALL, threads=THREADS, progress=progress)
    assert set(done) == set(QUANTITIES)


def test_quantities_are_waived_if_memory_cannot_be_allocated(
    device: VirtualDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(numel: int, dtype: torch.dtype) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory on the device\nTry this and that")

    monkeypatch.setattr(device, "empty", full)
    profile = virtual_profile(device, 1, monkeypatch)
    assert profile.measurements["h2d_bytes_per_s"].waived == "OutOfMemoryError: no memory on the device"
    assert profile.measurements["gpu_adam_params_per_s"].waived == "OutOfMemoryError: no memory on the device"
    assert profile.measurements["dram_update_bytes_per_s"].waived is None


def test_the_profile_has_the_reason_for_a_missing_gpu_kernel(device: VirtualDevice) -> None:
    def none() -> PlainAdam:
        raise KernelUnavailable("no Triton: pip install triton")

    adam = TimedAdam(device, UPDATE_S)
    with kernels(training_cpu_adam=lambda *_: adam, stock_cpu_adam=lambda _: adam, training_gpu_adam=none):
        profile = measure(device, Ranks(), SMALL, threads=THREADS)
    reason = "no Triton: pip install triton"
    assert profile.measurements["gpu_adam_params_per_s"].waived == reason
    assert profile.get("h2d_bytes_per_s") is not None


def test_a_rate_that_no_machine_reaches_is_waived(device: VirtualDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    device.copy_s = [1e-9] * 100
    device.issue_s = 0
    reason = virtual_profile(device, 1, monkeypatch).measurements["h2d_bytes_per_s"].waived
    assert reason == "implausible: the median is 1.05e+15, outside 3e+08 to 2e+12"


def test_there_is_no_profile_without_a_cpu_kernel() -> None:
    def no_compiler(num_sub_groups: int, num_threads: int, cores: Sequence[int]) -> PlainAdam:
        raise RuntimeError("Error building extension 'cpu_adam'")

    with (
        kernels(training_cpu_adam=no_compiler),
        pytest.raises(ProfileError, match=r"found no measurement \(RuntimeError: Error building extension") as caught,
    ):
        measure(None, Ranks(), SMALL, threads=THREADS)
    assert "deep-opt-states doctor" in str(caught.value)


# The fingerprint


def fingerprint_here(**changes: object) -> str:
    about = describe(on_accelerator=False, ranks_on_node=2, threads=THREADS)
    facts = {"provenance": about, "effort": SMALL, "world_size": 2, "works_with": "a", **changes}
    return fingerprint(**facts)


def test_a_fingerprint_changes_with_everything_that_changes_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    here = fingerprint_here()
    about = describe(on_accelerator=False, ranks_on_node=2, threads=THREADS)
    changed = {
        fingerprint_here(provenance=replace(about, **{name: other}))
        for name, other in {
            "cpu": "another",
            "cores": 99,
            "ranks": 9,
            "gpu": "",
            "driver": "999.1",
            "torch": "9.9",
            "deepspeed": "9.9",
        }.items()
        if getattr(about, name) != other
    }
    assert len(changed) == 6
    changed |= {
        fingerprint_here(effort=replace(SMALL, budget_s=9)),
        fingerprint_here(world_size=16),
        fingerprint_here(works_with="b"),
    }
    for fact in ("last_level_cache_bytes", "memory"):
        with monkeypatch.context() as patched:
            patched.setattr(machine, fact, {"last_level_cache_bytes": lambda: 77, "memory": other_memory}[fact])
            changed.add(fingerprint_here())
    with monkeypatch.context() as patched:
        patched.setattr(cache, "METHOD", 99)
        changed.add(fingerprint_here())
    assert len(changed | {here}) == 13


def test_a_fingerprint_is_the_same_on_another_day_and_node(monkeypatch: pytest.MonkeyPatch) -> None:
    about = describe(on_accelerator=False, ranks_on_node=2, threads=THREADS)
    assert fingerprint_here(provenance=replace(about, date="tomorrow", host="twin")) == fingerprint_here()


def other_memory() -> machine.HostMemory:
    return machine.HostMemory(total_bytes=77, available_bytes=7, limit_bytes=None)


@pytest.mark.usefixtures("by_the_clock")
def test_concurrent_rates_are_waived_for_a_device_that_overlaps_nothing() -> None:
    """Check only the reasons, which do not depend on the real clock of this test."""
    with kernels(training_cpu_adam=lambda *_: PlainAdam()):
        profile = measure(HostDevice(), Ranks(), SMALL, threads=THREADS)
    for name in ("cpu_adam_beside_transfers_params_per_s", "both_beside_cpu_adam_bytes_per_s"):
        reason = profile.measurements[name].waived
        assert reason is not None
        assert "nothing overlapped" in reason


def test_a_rate_that_is_higher_concurrently_than_alone_is_waived() -> None:
    concurrent, alone = "cpu_adam_beside_transfers_params_per_s", "cpu_adam_params_per_s"
    transfers = "both_beside_cpu_adam_bytes_per_s", *TRANSFERS
    measurements = {name: Measurement(waived="not here") for name in transfers} | {
        concurrent: Measurement(samples=(3e9,)),
        alone: Measurement(samples=(1e9,)),
    }
    assert set(noise_waivers(measurements)) == {concurrent}
    assert noise_waivers(measurements)[concurrent].waived == (
        "implausible: 3e+09, above 1.5 times cpu_adam_params_per_s alone, 1e+09"
    )
    assert noise_waivers({**measurements, concurrent: Measurement(samples=(1.2e9,))}) == {}


TRANSFERS = ("h2d_bytes_per_s", "d2h_bytes_per_s", "both_bytes_per_s")


def test_a_rate_in_both_directions_above_the_sum_of_the_two_is_waived_and_still_gives_a_plan() -> None:
    """Check the figures of an H100 beside other processes: this stopped a training run at its start."""
    found = profile()
    rates = dict(zip(TRANSFERS, (2.9e10, 3.94e10, 9.02e10), strict=True))
    slowed = {**found.measurements, **{name: Measurement(samples=(rate,)) for name, rate in rates.items()}}
    with pytest.raises(ProfileError, match="cannot exceed h2d_bytes_per_s plus d2h_bytes_per_s"):
        replace(found, measurements=slowed)
    waivers = noise_waivers(slowed)
    assert list(waivers) == ["both_bytes_per_s"]
    assert waivers["both_bytes_per_s"].waived == (
        "implausible: 9.02e+10, above 1.2 times h2d_bytes_per_s plus d2h_bytes_per_s alone, 6.84e+10"
    )
    assert noise_waivers({**slowed, "both_bytes_per_s": Measurement(samples=(8e10,))}) == {}
    used = replace(found, measurements=slowed | waivers)
    assert used.both_directions == pytest.approx(6.84e10)
    assert CostModel.from_profile(used).capacities[Resource.BOTH] == pytest.approx(6.84e10)
    assert waivers["both_bytes_per_s"].waived.startswith(IMPLAUSIBLE), "so that it is not cached"


def test_a_matrix_product_that_no_gpu_has_is_waived() -> None:
    for rate, waived in ((9e11, True), (2e12, False), (9.9e14, False), (1.3e15, True)):
        measurements = {"matmul_flops_per_s": Measurement(samples=(rate,))}
        assert set(noise_waivers(measurements, 80 * 10**9, 989e12)) == (set(measurements) if waived else set())
        assert noise_waivers(measurements, None, None) == {}, "a CPU may be that slow"
