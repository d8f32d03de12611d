"""List the probes, run them, and return the ``HardwareProfile`` of this machine."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from statistics import median
from typing import Any, Protocol

from deep_opt_states.device.cpu import HostDevice
from deep_opt_states.device.interface import Device
from deep_opt_states.device.kernels.adam import AdamKernel
from deep_opt_states.host import machine
from deep_opt_states.profiler import transfers
from deep_opt_states.profiler.adam_kernels import CpuAdamFactory, stock_cpu_adam, training_cpu_adam, training_gpu_adam
from deep_opt_states.profiler.adam_throughput import DeviceUpdates, HostUpdates, HostUpdatesDuringTransfers
from deep_opt_states.profiler.host_bandwidth import HostCopy, HostCopyLatency, UpdateInPlace
from deep_opt_states.profiler.host_states import SUB_GROUPS, HostStates
from deep_opt_states.profiler.matrix import MatrixProduct
from deep_opt_states.profiler.method import Probe, ProbeEffort, sample
from deep_opt_states.profiler.peaks import peak_flops
from deep_opt_states.profiler.provenance import Node, describe, smallest_node
from deep_opt_states.profiler.ranks import ProbeError, Ranks, call_on_all_ranks
from perf_model.prediction.hardware import (
    CONCURRENT_TO_ALONE,
    CONCURRENT_TOLERANCE,
    QUANTITIES,
    REQUIRED,
    HardwareProfile,
    Measurement,
    ProfileError,
)

NO_ACCELERATOR = "no accelerator: training here runs on the CPU"

IMPLAUSIBLE = "implausible: "
"""The beginning of the reason of a waiver whose cause is noise: a later measurement may succeed."""

CACHE_MULTIPLE = 3
"""The size of the probes' working set, of all ranks of a node together, relative to the last-level caches."""

SMALL_COPY_BYTES = 1024

CPU_MATRIX_SIZE = 1024
"""The largest matrix on the CPU. It is enough for full speed; with a matrix of GPU size the CPU would need seconds."""


class ProgressCallback(Protocol):
    """A function that is called before each probe and once at the end."""

    def __call__(self, done: int, total: int, title: str) -> None:
        """Show that ``done`` of ``total`` probes are done and that ``title`` is next; ``done == total`` at the end."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A probe with the quantities that it measures.

    ``prepare`` creates the probe; it is a string, the reason, if the probe cannot run on this machine.
    """

    title: str
    quantities: tuple[str, ...]
    prepare: Callable[[], Probe] | str


def show_no_progress(done: int, total: int, title: str) -> None:
    """Ignore the progress."""


def measure(
    device: Device[Any] | None,
    ranks: Ranks,
    effort: ProbeEffort,
    *,
    threads: int,
    cores: Sequence[int] = (),
    cpu_adam: CpuAdamFactory = training_cpu_adam,
    stock_adam: Callable[[int], AdamKernel] = stock_cpu_adam,
    device_adam: Callable[[], AdamKernel] = training_gpu_adam,
    progress: ProgressCallback = show_no_progress,
) -> HardwareProfile:
    """Return the profile of this machine with all ``ranks`` at work at the same time; the same on all ranks.

    This is a collective. ``device`` is None if the accelerator is the CPU. ``threads`` threads of this rank update on
    the CPU, pinned to ``cores`` if there are any. ``cpu_adam`` creates their kernel, ``stock_adam`` creates stock's
    kernel for a number of sub-groups, and ``device_adam`` creates the kernel that updates in the device's memory.

    Raise ``ProfileError`` on every rank if a quantity that every prediction needs could not be measured; any other
    quantity that fails is waived with the reason. All memory of the probes is freed, also in PyTorch's caches.
    """
    node = smallest_node(ranks, os.environ)
    training_threads = ranks.gather(threads)[0]
    host: Device[Any] = HostDevice() if device is None else device
    try:
        with ExitStack() as reserved:
            kernels = _Kernels(partial(cpu_adam, SUB_GROUPS), partial(stock_adam, SUB_GROUPS), device_adam)
            probes = _Probes(device, host, effort, node, threads, cores, kernels, reserved)
            # All ranks must run the same probes: the entries follow from equal arguments, the counts from rank 0's.
            counts = [count for count in thread_counts(node.cores_per_rank) if count != training_threads]
            measurements, by_threads = _run(probes, counts, effort, ranks, progress)
            by_threads[training_threads] = measurements["cpu_adam_params_per_s"]
    finally:
        # The states of training need the memory that the probes used.
        host.release_cached()

    for name in REQUIRED:
        _require(name, measurements[name])

    def about() -> dict[str, Any]:
        gpu = machine.gpu() if device is not None else None
        return {
            "name": platform.node(),
            "provenance": describe(on_accelerator=device is not None, node=node, threads=training_threads),
            "gpu_memory_bytes": gpu.memory_bytes if gpu else None,
            "host_memory_bytes": machine.memory().usable_bytes,
            "gpu_peak_flops": peak_flops(gpu.name) if gpu else None,
        }

    measurements |= noise_waivers(measurements)
    return HardwareProfile(
        measurements={name: measurements[name] for name in QUANTITIES if name in measurements},
        cpu_adam_by_threads=dict(sorted(by_threads.items())),
        **ranks.gather(call_on_all_ranks(ranks, about))[0],
    )


def noise_waivers(measurements: Mapping[str, Measurement]) -> dict[str, Measurement]:
    """Return waivers for the concurrent rates that are far above the same rate alone.

    Such a value cannot be right, but it is no reason to stop a training run.
    """
    return {
        concurrent: Measurement(waived=f"{IMPLAUSIBLE}{slowed.median:.3g}, and only {free.median:.3g} alone")
        for concurrent, alone in CONCURRENT_TO_ALONE.items()
        if (slowed := measurements[concurrent]).samples
        and (free := measurements[alone]).samples
        and slowed.median > CONCURRENT_TOLERANCE * free.median
    }


def implausible_quantities(profile: HardwareProfile) -> list[str]:
    """Return the names of the quantities that are waived because their samples were implausible."""
    measurements = profile.measurements.items()
    return [name for name, measurement in measurements if (measurement.waived or "").startswith(IMPLAUSIBLE)]


def thread_counts(cores: int) -> list[int]:
    """Return 1, 2, 4, ... up to ``cores``, and ``cores`` itself."""
    return sorted({2**power for power in range(cores.bit_length())} | {cores})


@dataclass(frozen=True)
class _Kernels:
    """Factories of the Adam kernels; ``cpu`` takes the number of threads, and their cores."""

    cpu: Callable[[int, Sequence[int]], AdamKernel]
    stock: Callable[[], AdamKernel]
    device: Callable[[], AdamKernel]


class _Probes:
    """The probes of one measurement.

    ``host`` allocates host memory. The CPU's probes run one after another in the same memory, which ``reserved`` frees.
    """

    def __init__(
        self,
        device: Device[Any] | None,
        host: Device[Any],
        effort: ProbeEffort,
        node: Node,
        threads: int,
        cores: Sequence[int],
        kernels: _Kernels,
        reserved: ExitStack,
    ) -> None:
        self._device = device
        self._host = host
        self._threads = threads
        self._cores = cores
        self._kernels = kernels
        self._reserved = reserved
        cache_bytes = CACHE_MULTIPLE * (machine.last_level_cache_bytes() or 0) // node.ranks
        self._copy_bytes = max(effort.copy_bytes, cache_bytes // 2)  # each direction has such a buffer
        self._update_numel = max(effort.update_numel, cache_bytes // 16)  # p, m and v in fp32, two tensors in bf16
        self._launch_numel = effort.launch_numel
        on_cpu = device is None
        self._matrix_size = min(effort.matrix_size, CPU_MATRIX_SIZE) if on_cpu else effort.matrix_size

    def entries(self) -> list[Entry]:
        """Return all probes in the order in which they run."""
        return [
            self._one_way("Host to accelerator", transfers.pinned_h2d, "h2d_bytes_per_s"),
            self._one_way("Accelerator to host", transfers.pinned_d2h, "d2h_bytes_per_s"),
            self._on_accelerator("Both directions at once", self._both_ways, "both_bytes_per_s"),
            self._one_way("Host to accelerator, pageable", transfers.pageable_h2d, "pageable_h2d_bytes_per_s"),
            self._one_way("Accelerator to host, pageable", transfers.pageable_d2h, "pageable_d2h_bytes_per_s"),
            _entry("Latency of a copy", self._latency, "copy_latency_s"),
            _entry("CPU Adam", self._cpu_adam, "cpu_adam_params_per_s"),
            _entry("CPU Adam of stock DeepSpeed", self._stock_cpu_adam, "stock_cpu_adam_params_per_s"),
            self._on_accelerator(
                "CPU Adam during transfers",
                self._cpu_adam_during_transfers,
                "cpu_adam_beside_transfers_params_per_s",
                "both_beside_cpu_adam_bytes_per_s",
            ),
            _entry("Host memory, in place", lambda: UpdateInPlace(self._memory.slab), "dram_update_bytes_per_s"),
            _entry("Host memory, copied", lambda: HostCopy(self._memory.slab), "dram_copy_bytes_per_s"),
            self._on_accelerator("GPU Adam", self._gpu_adam, "gpu_adam_params_per_s"),
            _entry("Matrix product", lambda: MatrixProduct(self._host, self._matrix_size), "matmul_flops_per_s"),
        ]

    def entry_with_threads(self, count: int) -> Entry:
        """Return the probe of the CPU's Adam with ``count`` threads."""

        def prepare() -> Probe:
            # Threads are pinned only if this rank has enough cores for all of them.
            cores = self._cores[:count] if count <= len(self._cores) else ()
            return HostUpdates.with_own_threads(self._kernels.cpu(count, cores), self._memory)

        return _entry(f"CPU Adam, {count} thread{'' if count == 1 else 's'}", prepare, "cpu_adam_params_per_s")

    @cached_property
    def _memory(self) -> HostStates:
        states = HostStates(self._host, self._update_numel, self._kernels.cpu(self._threads, self._cores))
        self._reserved.callback(states.close)
        return states

    def _on_accelerator(self, title: str, prepare: Callable[[Device[Any]], Probe], *quantities: str) -> Entry:
        return _entry(title, NO_ACCELERATOR if self._device is None else partial(prepare, self._device), *quantities)

    def _one_way(self, title: str, create: Callable[[Device[Any], int], transfers.Copies], quantity: str) -> Entry:
        def prepare(device: Device[Any]) -> Probe:
            return transfers.OneWay(device, create(device, self._copy_bytes), 2, quantity)

        return self._on_accelerator(title, prepare, quantity)

    def _both_ways(self, device: Device[Any]) -> Probe:
        return transfers.BothWays(device, *transfers.pinned_both(device, self._copy_bytes), 4)

    def _latency(self) -> Probe:
        if self._device is None:
            return HostCopyLatency(self._host, self._memory)
        copies = transfers.pinned_h2d(self._device, SMALL_COPY_BYTES)
        return transfers.Latency(self._device, copies, 64, "copy_latency_s")

    def _cpu_adam(self) -> HostUpdates:
        return HostUpdates.with_training_threads(self._memory)

    def _stock_cpu_adam(self) -> Probe:
        return HostUpdates.with_stock_kernel(self._kernels.stock(), self._memory, self._host)

    def _cpu_adam_during_transfers(self, device: Device[Any]) -> Probe:
        return HostUpdatesDuringTransfers(device, self._cpu_adam(), *transfers.pinned_both(device, self._copy_bytes))

    def _gpu_adam(self, device: Device[Any]) -> Probe:
        return DeviceUpdates(device, self._launch_numel, self._kernels.device())


def _run(
    probes: _Probes, counts: Sequence[int], effort: ProbeEffort, ranks: Ranks, progress: ProgressCallback
) -> tuple[dict[str, Measurement], dict[int, Measurement]]:
    """Run all probes, and return the measurements by quantity, and those of the CPU's Adam by number of threads."""
    entries, entries_by_threads = probes.entries(), {count: probes.entry_with_threads(count) for count in counts}
    total = len(entries) + len(entries_by_threads)

    measurements: dict[str, Measurement] = {}
    for done, entry in enumerate(entries):
        progress(done, total, entry.title)
        measurements |= _measure(entry, effort, ranks)
    by_threads: dict[int, Measurement] = {}
    for done, (count, entry) in enumerate(entries_by_threads.items(), start=len(entries)):
        progress(done, total, entry.title)
        by_threads[count] = _measure(entry, effort, ranks)["cpu_adam_params_per_s"]
    progress(total, total, "done")
    return measurements, by_threads


def _entry(title: str, prepare: Callable[[], Probe] | str, *quantities: str) -> Entry:
    return Entry(title=title, quantities=quantities, prepare=prepare)


def _measure(entry: Entry, effort: ProbeEffort, ranks: Ranks) -> dict[str, Measurement]:
    if isinstance(entry.prepare, str):
        return dict.fromkeys(entry.quantities, Measurement(waived=entry.prepare))
    try:
        samples = sample(entry.prepare, effort, ranks)
    except ProbeError as error:
        return dict.fromkeys(entry.quantities, Measurement(waived=str(error)))
    return {name: _plausible(name, [rates[name] for rates in samples]) for name in entry.quantities}


def _plausible(name: str, samples: Sequence[float]) -> Measurement:
    """Return the samples without those that no machine reaches, such as those of a process that was stopped.

    The measurement is waived if half of the samples or more are implausible.
    """
    low, high = QUANTITIES[name].low, QUANTITIES[name].high
    inside = tuple(rate for rate in samples if low <= rate <= high)
    if 2 * len(inside) > len(samples):
        return Measurement(samples=inside)
    return Measurement(waived=f"{IMPLAUSIBLE}the median is {median(samples):.3g}, outside {low:g} to {high:g}")


def _require(name: str, measurement: Measurement) -> None:
    if measurement.waived is not None:
        raise ProfileError(
            f"{name}: is needed for every prediction, found no measurement ({measurement.waived}).\n"
            f"Find out why this machine cannot measure it: deep-opt-states doctor."
        )
