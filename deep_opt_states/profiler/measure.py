"""Which probes there are, and the profile that comes of them."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from statistics import median
from typing import Any, Protocol

from deep_opt_states.device.cpu import HostDevice
from deep_opt_states.device.interface import Device
from deep_opt_states.device.kernels.adam import AdamKernel
from deep_opt_states.host import machine
from deep_opt_states.profiler import transfers
from deep_opt_states.profiler.adam_kernels import CpuAdam, stock_cpu_adam, training_cpu_adam, training_gpu_adam
from deep_opt_states.profiler.adam_throughput import (
    DeviceUpdates,
    HostUpdates,
    HostUpdatesBesideTransfers,
)
from deep_opt_states.profiler.host_bandwidth import Copied, CopyLatency, Rounded, UpdateInPlace
from deep_opt_states.profiler.host_states import SUB_GROUPS, HostStates
from deep_opt_states.profiler.matrix import MatrixProduct
from deep_opt_states.profiler.method import Effort, Probe, sample
from deep_opt_states.profiler.peaks import peak_flops
from deep_opt_states.profiler.provenance import Node, describe, smallest_node
from deep_opt_states.profiler.ranks import ProbeError, Ranks, agree
from perf_model.prediction.hardware import (
    BESIDE_TOLERANCE,
    NOT_ABOVE,
    QUANTITIES,
    REQUIRED,
    HardwareProfile,
    Measurement,
    ProfileError,
)

NO_ACCELERATOR = "no accelerator: training here runs on the CPU"

CACHES = 3
"""What is worked on is so many times as large as the last-level caches, by all ranks of a node together."""

SMALL_COPY_BYTES = 1024

CPU_MATRIX_SIZE = 1024
"""The CPU reaches its speed with smaller ones, and needs seconds for a GPU's."""


class Progress(Protocol):
    def __call__(self, done: int, total: int, title: str) -> None:
        """Before each probe, how many are done and what the next one measures; ``done == total`` at the end."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A probe and what it measures; ``prepare`` is what keeps it from being run where that is a text."""

    title: str
    quantities: tuple[str, ...]
    prepare: Callable[[], Probe] | str


def silent(done: int, total: int, title: str) -> None:
    pass


def measure(
    device: Device[Any] | None,
    ranks: Ranks,
    effort: Effort,
    *,
    threads: int,
    cores: Sequence[int] = (),
    cpu_adam: CpuAdam = training_cpu_adam,
    stock_adam: Callable[[int], AdamKernel] = stock_cpu_adam,
    device_adam: Callable[[], AdamKernel] = training_gpu_adam,
    progress: Progress = silent,
) -> HardwareProfile:
    """The profile of this machine with all ``ranks`` at work at once; the same on all of them. A collective.

    ``device`` is None where the accelerator is the CPU; ``threads`` of this rank update on the CPU, each on its own of
    ``cores`` if there are any. ``cpu_adam`` makes their kernel, ``stock_adam`` stock's for a number of sub-groups;
    ``device_adam`` makes what updates in the device's memory. Raises ``ProfileError``, on every rank, if what no
    prediction can do without could not be measured; whatever else fails is waived with the reason.

    Nothing that was reserved for it is kept, also not by PyTorch's caches.
    """
    node = smallest_node(ranks, os.environ)
    training_threads = ranks.gather(threads)[0]
    host: Device[Any] = HostDevice() if device is None else device
    try:
        with ExitStack() as reserved:
            make = _Kernels(partial(cpu_adam, SUB_GROUPS), partial(stock_adam, SUB_GROUPS), device_adam)
            entries, updates = _entries(device, host, effort, node, threads, cores, make, reserved)
            # All ranks in step: the counts are of rank 0, and the probes follow from the arguments.
            counts = [count for count in thread_counts(node.cores_per_rank) if count != training_threads]
            total = len(entries) + len(counts)

            measurements: dict[str, Measurement] = {}
            for done, entry in enumerate(entries):
                progress(done, total, entry.title)
                measurements |= _measure(entry, effort, ranks)
            by_threads = {training_threads: measurements["cpu_adam_params_per_s"]}
            for done, count in enumerate(counts, start=len(entries)):
                progress(done, total, f"CPU Adam, {count} thread{'' if count == 1 else 's'}")
                entry = Entry(title="", quantities=("cpu_adam_params_per_s",), prepare=partial(updates, count))
                by_threads[count] = _measure(entry, effort, ranks)["cpu_adam_params_per_s"]
            progress(total, total, "done")
    finally:
        # The states of training have to find the memory that the probes had.
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

    measurements |= waived_noise(measurements)
    return HardwareProfile(
        measurements={name: measurements[name] for name in QUANTITIES},
        cpu_adam_by_threads=dict(sorted(by_threads.items())),
        **ranks.gather(agree(ranks, about))[0],
    )


def waived_noise(measurements: Mapping[str, Measurement]) -> dict[str, Measurement]:
    """What came out far above the same alone: not to be believed, and no reason to stop a training run."""
    return {
        beside: Measurement(waived=f"not believed: {slowed.median:.3g}, and {free.median:.3g} alone")
        for beside, of in NOT_ABOVE.items()
        if (slowed := measurements[beside]).samples
        and (free := measurements[of]).samples
        and slowed.median > BESIDE_TOLERANCE * free.median
    }


def thread_counts(cores: int) -> list[int]:
    """1, 2, 4, ... and ``cores``."""
    return sorted({2**power for power in range(cores.bit_length())} | {cores})


@dataclass(frozen=True)
class _Kernels:
    """Factories of the Adam kernels; ``cpu`` takes the number of threads, and their cores."""

    cpu: Callable[[int, Sequence[int]], AdamKernel]
    stock: Callable[[], AdamKernel]
    device: Callable[[], AdamKernel]


def _entries(
    device: Device[Any] | None,
    host: Device[Any],
    effort: Effort,
    node: Node,
    threads: int,
    cores: Sequence[int],
    make: _Kernels,
    reserved: ExitStack,
) -> tuple[list[Entry], Callable[[int], HostUpdates]]:
    """Return all probes, and a function that makes the CPU probe for a number of threads.

    The CPU's probes work one after another in the same memory, which ``reserved`` gives back.
    """
    cache_bytes = CACHES * (machine.last_level_cache_bytes() or 0) // node.ranks
    copy_bytes = max(effort.copy_bytes, cache_bytes // 2)  # each way has such a buffer
    update_numel = max(effort.update_numel, cache_bytes // 16)  # fp32 p, m, v and bf16 twice
    matrix_size = effort.matrix_size if device is not None else min(effort.matrix_size, CPU_MATRIX_SIZE)

    @cache
    def memory() -> HostStates:
        states = HostStates(host, update_numel, make.cpu(threads, cores))
        reserved.callback(states.close)
        return states

    def in_training() -> HostUpdates:
        return HostUpdates.as_in_training(memory())

    def updates(count: int) -> HostUpdates:
        # More threads than this rank has cores of its own for are not pinned.
        return HostUpdates.by(make.cpu(count, cores[:count] if count <= len(cores) else ()), memory())

    def by_stock() -> HostUpdates:
        return HostUpdates.by_stock(make.stock(), memory(), host)

    def on_device(prepare: Callable[[Device[Any]], Probe]) -> Callable[[], Probe] | str:
        return NO_ACCELERATOR if device is None else partial(prepare, device)

    def one_way(copies: Callable[[Device[Any], int], transfers.Copies], quantity: str) -> Callable[[], Probe] | str:
        return on_device(lambda it: transfers.OneWay(it, copies(it, copy_bytes), 2, quantity))

    def both_ways(it: Device[Any]) -> Probe:
        return transfers.BothWays(it, *transfers.pinned_both(it, copy_bytes), 4)

    def beside(it: Device[Any]) -> Probe:
        return HostUpdatesBesideTransfers(it, in_training(), *transfers.pinned_both(it, copy_bytes))

    def latency() -> Probe:
        if device is None:
            return CopyLatency(host, memory())
        return transfers.Latency(device, transfers.pinned_h2d(device, SMALL_COPY_BYTES), 64, "copy_latency_s")

    def on_gpu(it: Device[Any]) -> Probe:
        return DeviceUpdates(it, effort.launch_numel, make.device())

    def entry(title: str, prepare: Callable[[], Probe] | str, *quantities: str) -> Entry:
        return Entry(title=title, quantities=quantities, prepare=prepare)

    h2d, d2h = "h2d_bytes_per_s", "d2h_bytes_per_s"
    pageable_h2d, pageable_d2h = f"pageable_{h2d}", f"pageable_{d2h}"
    beside_quantities = ("cpu_adam_beside_transfers_params_per_s", "both_beside_cpu_adam_bytes_per_s")
    return [
        entry("Host to accelerator", one_way(transfers.pinned_h2d, h2d), h2d),
        entry("Accelerator to host", one_way(transfers.pinned_d2h, d2h), d2h),
        entry("Both directions at once", on_device(both_ways), "both_bytes_per_s"),
        entry("Host to accelerator, pageable", one_way(transfers.pageable_h2d, pageable_h2d), pageable_h2d),
        entry("Accelerator to host, pageable", one_way(transfers.pageable_d2h, pageable_d2h), pageable_d2h),
        entry("Latency of a copy", latency, "copy_latency_s"),
        entry("CPU Adam", in_training, "cpu_adam_params_per_s"),
        entry("CPU Adam of stock DeepSpeed", by_stock, "stock_cpu_adam_params_per_s"),
        entry("CPU Adam beside transfers", on_device(beside), *beside_quantities),
        entry("Host memory, in place", lambda: UpdateInPlace(memory().slab), "dram_update_bytes_per_s"),
        entry("Host memory, copied", lambda: Copied(memory().slab), "dram_copy_bytes_per_s"),
        entry("Rounding to 16 bit", lambda: Rounded(memory().slab), "rounding_params_per_s"),
        entry("GPU Adam", on_device(on_gpu), "gpu_adam_params_per_s"),
        entry("Matrix product", lambda: MatrixProduct(host, matrix_size), "matmul_flops_per_s"),
    ], updates


def _measure(entry: Entry, effort: Effort, ranks: Ranks) -> dict[str, Measurement]:
    if isinstance(entry.prepare, str):
        return dict.fromkeys(entry.quantities, Measurement(waived=entry.prepare))
    try:
        samples = sample(entry.prepare, effort, ranks)
    except ProbeError as error:
        return dict.fromkeys(entry.quantities, Measurement(waived=str(error)))
    return {name: _plausible(name, [rates[name] for rates in samples]) for name in entry.quantities}


def _plausible(name: str, samples: Sequence[float]) -> Measurement:
    """Without the samples that no machine reaches, such as of a process that was stopped; waived if they are many."""
    low, high = QUANTITIES[name].low, QUANTITIES[name].high
    inside = tuple(rate for rate in samples if low <= rate <= high)
    if 2 * len(inside) > len(samples):
        return Measurement(samples=inside)
    return Measurement(waived=f"not plausible: a median of {median(samples):.3g}, outside {low:g} to {high:g}")


def _require(name: str, measurement: Measurement) -> None:
    if measurement.waived is not None:
        raise ProfileError(
            f"{name}: is needed for every prediction, found no measurement ({measurement.waived}).\n"
            f"See what keeps this machine from it: deep-opt-states doctor."
        )
