"""Test ``measure``: every quantity is measured, or waived with the reason, whatever the device does."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from deep_opt_states.device.kernels.adam import AdamKernel, AdamTensors, ElementRange
from deep_opt_states.device.kernels.library import KernelUnavailable
from deep_opt_states.host import machine
from deep_opt_states.profiler import cache
from deep_opt_states.profiler import ranks as ranks_module
from deep_opt_states.profiler.cache import fingerprint
from deep_opt_states.profiler.peaks import peak_flops
from deep_opt_states.profiler.profile import IMPLAUSIBLE, describe, measure, noise_waivers
from deep_opt_states.profiler.ranks import COLLECTIVES as COLLECTIVES_PER_REPETITION
from deep_opt_states.profiler.ranks import CollectiveGroups, Ranks
from perf_model.prediction.hardware import QUANTITIES, HardwareProfile, Measurement, ProfileError
from tests.profiler.virtual import SMALL, TimedAdam, VirtualDevice, kernels, virtual_clock

THREADS = 3
TICK_S, UPDATE_S = 1e-4, 5e-4
"""The host's virtual clock advances by this much when it is read, and in an update with the reading that follows."""
COPY_LATENCY_S = 1e-6
IN_NODE_S, ACROSS_NODES_S = 4e-5, 7e-4
"""Seconds of a collective between two ranks of a node, or of two nodes."""
LAUNCH_S, KERNEL_S, PRODUCT_S = 6e-5, 2e-6, 2e-7
"""A launch on the accelerator takes the host longer than an update or a matrix product takes the accelerator."""


class GroupOfTwo:
    """Two ranks, whose collectives pass nothing on, and take ``collective_s`` if the other rank is not late."""

    def __init__(self, device: VirtualDevice, collective_s: float) -> None:
        self._device, self._collective_s, self._issued = device, collective_s, 0

    def size(self) -> int:
        return 2

    def run(self) -> None:
        self._device.issuing.run(self._collective_s if self._issued % (1 + COLLECTIVES_PER_REPETITION) else 0.5)
        self._issued += 1


def run_collective(received: torch.Tensor, sent: torch.Tensor, group: GroupOfTwo) -> None:
    group.run()


@pytest.fixture(autouse=True)
def _no_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the caches, so that the working sets need not be larger than them."""
    monkeypatch.setattr(machine, "last_level_cache_bytes", lambda: None)


@pytest.fixture
def device() -> Iterator[VirtualDevice]:
    """Return a device with a virtual clock, and disable the collector, so that a cycle of references keeps memory."""
    gc.disable()
    device = VirtualDevice(issue_s=COPY_LATENCY_S)
    with virtual_clock(device, tick_s=TICK_S, launch_s=LAUNCH_S, product_s=PRODUCT_S):
        yield device
    gc.enable()


SLAB_BYTES = 8 * (3 * 10_000 * 4 + 2 * 20_032)
"""The slab of 80,000 parameters in eight sub-groups; the 16-bit tensors are padded to whole cache lines."""


class FailingAdam(TimedAdam):
    def __init__(self, device: VirtualDevice, fails_at: int) -> None:
        super().__init__(device, UPDATE_S - TICK_S)
        self._updates_left = fails_at

    def update(self, sub_group: int, tensors: AdamTensors, element_range: ElementRange | None = None) -> None:
        self._updates_left -= 1
        if self._updates_left == 0:
            raise MemoryError("broken on purpose")
        super().update(sub_group, tensors, element_range)


def virtual_profile(
    device: VirtualDevice, plugin: TimedAdam | None = None, make_on_gpu: Callable[[], AdamKernel] | None = None
) -> HardwareProfile:
    stock = TimedAdam(device, 1.5 * UPDATE_S - TICK_S)
    groups = CollectiveGroups(in_node=GroupOfTwo(device, IN_NODE_S), across_nodes=GroupOfTwo(device, ACROSS_NODES_S))

    def pinned(_: int, threads: int, cores: tuple[int, ...]) -> TimedAdam:
        assert cores == (5, 1, 3)[:threads], "pinned as in training"
        return plugin or TimedAdam(device, UPDATE_S * THREADS / threads - TICK_S)

    with (
        kernels(
            training_cpu_adam=pinned,
            stock_cpu_adam=lambda _: stock,
            training_gpu_adam=make_on_gpu or (lambda: TimedAdam(device, LAUNCH_S, KERNEL_S)),
        ),
        mock.patch.multiple(ranks_module, _ALL_GATHER=run_collective, _REDUCE_SCATTER=run_collective),
        mock.patch.object(os, "sched_getaffinity", return_value=set(range(6))),
        mock.patch.object(machine, "core_quota", return_value=None),
    ):
        return measure(device, Ranks(), SMALL, threads=THREADS, groups=groups, cores=(5, 1, 3))


@pytest.mark.P5
def test_every_quantity_is_exact_on_a_virtual_clock(device: VirtualDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpu", lambda: SimpleNamespace(name="NVIDIA H100 PCIe", total_memory=80 * 2**30))
    threads = threading.active_count()
    profile = virtual_profile(device)
    assert profile.gpu_peak_flops == 756e12
    assert {name: found.waived for name, found in profile.measurements.items()} == dict.fromkeys(QUANTITIES)
    copy_s = 2**20 / 1e10 + COPY_LATENCY_S
    for name, expected in {
        "h2d_bytes_per_s": 2**20 / copy_s,
        "d2h_bytes_per_s": 2**20 / copy_s,
        "both_bytes_per_s": 2 * 2**20 / copy_s,
        "pageable_h2d_bytes_per_s": 2**20 / copy_s,
        "copy_latency_s": 1024 / 1e10 + COPY_LATENCY_S,
        "cpu_adam_params_per_s": 10_000 / UPDATE_S,
        "cpu_adam_threads": THREADS,
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
    assert device.most_held_bytes > SLAB_BYTES
    assert (device.held_bytes, device.registered, threading.active_count()) == (0, [], threads)


@pytest.mark.parametrize("fails_at", [1, 24])
def test_all_memory_is_freed_while_the_error_of_a_probe_is_handled(device: VirtualDevice, fails_at: int) -> None:
    with pytest.raises(ProfileError, match="MemoryError: broken on purpose") as caught:
        virtual_profile(device, FailingAdam(device, fails_at))
    assert caught.value.__traceback__ is not None
    assert (device.held_bytes, device.registered) == (0, [])
    same_on_any_threads = TimedAdam(device, UPDATE_S - TICK_S)
    profile = virtual_profile(device, same_on_any_threads, make_on_gpu=lambda: FailingAdam(device, fails_at=1))
    assert profile.rate("cpu_adam_threads") == 1
    assert profile.measurements["gpu_adam_params_per_s"].waived == "MemoryError: broken on purpose"
    assert device.held_bytes == 0


def test_the_peak_of_a_gpu_is_looked_up_by_its_name() -> None:
    for tera, names in {
        312: ("NVIDIA A100-SXM4-40GB", "NVIDIA A100 80GB PCIe"),
        989: ("NVIDIA H100 80GB HBM3", "NVIDIA H200"),
        756: ("NVIDIA H100 PCIe",),
        165.2: ("NVIDIA GeForce RTX 4090",),
        None: ("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "NVIDIA A10G"),
    }.items():
        assert {peak_flops(name) for name in names} == {None if tera is None else tera * 1e12}, names


def test_memory_that_cannot_be_locked_is_freed_and_reported_with_the_remedy(device: VirtualDevice) -> None:
    def refuse(address: int, size_bytes: int) -> Any:
        raise RuntimeError("CUDA error: out of memory")

    device._register = refuse  # type: ignore[method-assign]
    with pytest.raises(ProfileError, match=r"must be page-locked, .*: CUDA error: out of memory\. Raise the memlock"):
        virtual_profile(device)
    assert device.held_bytes == 0


def test_a_quantity_is_waived_with_the_reason(device: VirtualDevice) -> None:
    no_kernel = mock.Mock(side_effect=KernelUnavailable("no Triton: pip install triton"))
    with mock.patch.object(device, "empty", side_effect=torch.OutOfMemoryError("no memory\nTry this and that")):
        waived = virtual_profile(device, make_on_gpu=no_kernel).measurements
    assert waived["gpu_adam_params_per_s"].waived == "no Triton: pip install triton"
    assert waived["h2d_bytes_per_s"].waived == "OutOfMemoryError: no memory"
    assert waived["dram_update_bytes_per_s"].waived is None
    device.copy_s, device.issue_s = [1e-9] * 100, 0
    waived = virtual_profile(device).measurements
    assert waived["h2d_bytes_per_s"].waived == "implausible: the median is 1.05e+15, outside 3e+08 to 2e+12"


def test_a_fingerprint_changes_with_everything_that_changes_measurements() -> None:
    about = describe(on_accelerator=False, ranks_on_node=2, threads=THREADS)

    def fingerprint_here(**changes: object) -> str:
        return fingerprint(**{"provenance": about, "effort": SMALL, "world_size": 2, "works_with": "a", **changes})

    here = fingerprint_here()
    others = {"cpu": "another", "cores": 99, "ranks": 9, "driver": "999.1", "torch": "9.9", "deepspeed": "9.9"}
    changes: list[dict[str, object]] = [{"provenance": replace(about, **{name: each})} for name, each in others.items()]
    changes += [{"effort": replace(SMALL, budget_s=9)}, {"world_size": 16}, {"works_with": "b"}]
    found = {here, *(fingerprint_here(**change) for change in changes)}
    other_memory = machine.HostMemory(usable_bytes=77, available_bytes=7)
    cached, method = mock.Mock(return_value=77), (cache, "METHOD", 99)
    for patched in (method, (machine, "last_level_cache_bytes", cached), (machine, "memory", lambda: other_memory)):
        with mock.patch.object(*patched):
            found.add(fingerprint_here())
    assert len(found) == 13
    assert fingerprint_here(provenance=replace(about, date="tomorrow", host="twin")) == here


TRANSFERS = {"h2d_bytes_per_s": 2.9e10, "d2h_bytes_per_s": 3.94e10}
BESIDE, PRODUCT = "cpu_adam_beside_transfers_params_per_s", "matmul_flops_per_s"


@pytest.mark.parametrize(
    ("rates", "reason"),
    [
        ({BESIDE: 3e9, "cpu_adam_params_per_s": 1e9}, "3e+09, above 1.5 times cpu_adam_params_per_s alone, 1e+09"),
        ({BESIDE: 1.2e9, "cpu_adam_params_per_s": 1e9}, None),
        ({"both_bytes_per_s": 9.02e10, **TRANSFERS}, "9.02e+10, above 1.2 times h2d_bytes_per_s plus d2h_bytes_per_s"),
        ({"both_bytes_per_s": 8e10, **TRANSFERS}, None),
        ({PRODUCT: 9e11}, ""),
        ({PRODUCT: 2e12}, None),
        ({PRODUCT: 9.9e14}, None),
        ({PRODUCT: 1.3e15}, ""),
    ],
)
def test_a_rate_that_cannot_be_true_with_the_others_is_waived(rates: dict[str, float], reason: str | None) -> None:
    names = ("both_beside_cpu_adam_bytes_per_s", BESIDE, "both_bytes_per_s", *TRANSFERS)
    measurements = {name: Measurement(waived="not here") for name in names}
    measurements |= {name: Measurement(samples=(rate,)) for name, rate in rates.items()}
    waivers = noise_waivers(measurements, 80 * 10**9, 989e12)
    assert [*waivers] == ([] if reason is None else [next(iter(rates))])
    # A rate that is waived with this word is not cached.
    assert all(found.waived.startswith(f"{IMPLAUSIBLE}{reason}") for found in waivers.values())
    assert PRODUCT not in noise_waivers(measurements, None, None), "a CPU may be that slow"
