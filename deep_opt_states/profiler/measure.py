"""Run the probes, and return the ``HardwareProfile`` of this machine."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import Any, Protocol

from deep_opt_states.device.cpu import HostDevice
from deep_opt_states.device.interface import Device
from deep_opt_states.device.kernels.adam import AdamKernel
from deep_opt_states.host import machine
from deep_opt_states.profiler.adam_kernels import CpuAdamFactory, stock_cpu_adam, training_cpu_adam, training_gpu_adam
from deep_opt_states.profiler.host_states import SUB_GROUPS
from deep_opt_states.profiler.method import ProbeEffort, sample
from deep_opt_states.profiler.peaks import peak_flops
from deep_opt_states.profiler.probe_list import NO_GROUPS, Entry, Kernels, Probes
from deep_opt_states.profiler.process_groups import CollectiveGroups
from deep_opt_states.profiler.provenance import describe, smallest_node
from deep_opt_states.profiler.ranks import ProbeError, Ranks, call_on_all_ranks
from perf_model.prediction.hardware import (
    QUANTITIES,
    REQUIRED,
    HardwareProfile,
    Measurement,
    ProfileError,
    matmul_bounds,
    rates_above_limits,
)

IMPLAUSIBLE = "implausible: "
"""The beginning of the reason of a waiver whose cause is noise: a later measurement may succeed."""


class ProgressCallback(Protocol):
    """A function that is called before each probe and once at the end."""

    def __call__(self, done: int, total: int, title: str) -> None:
        """Show that ``done`` of ``total`` probes are done and that ``title`` is next; ``done == total`` at the end."""


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
    groups: CollectiveGroups = NO_GROUPS,
    progress: ProgressCallback = show_no_progress,
) -> HardwareProfile:
    """Return the profile of this machine with all ``ranks`` at work at the same time; the same on all ranks.

    This is a collective. ``device`` is None if the accelerator is the CPU. ``threads`` threads of this rank update on
    the CPU, pinned to ``cores`` if there are any. ``cpu_adam`` creates their kernel, ``stock_adam`` creates stock's
    kernel for a number of sub-groups, and ``device_adam`` creates the kernel that updates in the device's memory.
    ``groups`` are those whose collectives are measured.

    Raise ``ProfileError`` on every rank if a quantity that every prediction needs could not be measured; any other
    quantity that fails is waived with the reason. All memory of the probes is freed, also in PyTorch's caches.
    """
    node = smallest_node(ranks, os.environ)
    training_threads = ranks.gather(threads)[0]
    host: Device[Any] = HostDevice() if device is None else device
    try:
        with ExitStack() as reserved:
            kernels = Kernels(partial(cpu_adam, SUB_GROUPS), partial(stock_adam, SUB_GROUPS), device_adam)
            probes = Probes(device, host, effort, node, threads, cores, kernels, groups, reserved)
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

    described = ranks.gather(call_on_all_ranks(ranks, about))[0]
    measurements |= noise_waivers(measurements)
    measurements |= matmul_waivers(measurements, described["gpu_memory_bytes"], described["gpu_peak_flops"])
    return HardwareProfile(
        measurements={name: measurements[name] for name in QUANTITIES},
        cpu_adam_by_threads=dict(sorted(by_threads.items())),
        **described,
    )


def noise_waivers(measurements: Mapping[str, Measurement]) -> dict[str, Measurement]:
    """Return waivers for the concurrent rates that are far above the same rates alone.

    Such a value cannot be right, but it is no reason to stop a training run. It occurs if another process slowed the
    measurement of the rates alone.
    """

    def median_of(name: str) -> float | None:
        return measurements[name].median if measurements[name].samples else None

    return {
        name: Measurement(waived=f"{IMPLAUSIBLE}{rate:.3g}, above {tolerance} times {names} alone, {alone:.3g}")
        for name, rate, names, alone, tolerance in rates_above_limits(median_of)
    }


def matmul_waivers(
    measurements: Mapping[str, Measurement], gpu_memory_bytes: int | None, peak: float | None
) -> dict[str, Measurement]:
    """Return waivers for the rates of matrix products that no GPU has, or that exceed ``peak``, in FLOP/s.

    Return none on a machine without a GPU. Another process that uses the GPU can make products that slow.
    """
    large = measurements["matmul_flops_per_s"]
    if gpu_memory_bytes is None or not large.samples:
        return {}
    low, high = matmul_bounds(gpu_memory_bytes, peak, has_accelerator=True)
    if low <= large.median <= high:
        return {}
    why = f"{IMPLAUSIBLE}{large.median:.3g} FLOP/s, outside {low:.3g} to {high:.3g}"
    return dict.fromkeys(("matmul_flops_per_s", "matmul_small_flops_per_s"), Measurement(waived=why))


def implausible_quantities(profile: HardwareProfile) -> list[str]:
    """Return the names of the quantities that are waived because their samples were implausible."""
    measurements = profile.measurements.items()
    return [name for name, measurement in measurements if (measurement.waived or "").startswith(IMPLAUSIBLE)]


def thread_counts(cores: int) -> list[int]:
    """Return 1, 2, 4, ... up to ``cores``, and ``cores`` itself."""
    return sorted({2**power for power in range(cores.bit_length())} | {cores})


def _run(
    probes: Probes, counts: Sequence[int], effort: ProbeEffort, ranks: Ranks, progress: ProgressCallback
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
