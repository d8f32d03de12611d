"""Measure the ``HardwareProfile`` of this machine: warm up, repeat on all ranks at the same time, keep every sample.

The slowest rank counts. A quantity that cannot be measured is waived with the reason.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache
from importlib import metadata
from statistics import median
from typing import Any, TypeAlias

import torch

from deep_opt_states.device.cpu import HostDevice
from deep_opt_states.device.interface import Device
from deep_opt_states.device.kernels.adam import DEFAULT_BETAS, AdamKernel
from deep_opt_states.host import machine
from deep_opt_states.profiler import probes
from deep_opt_states.profiler.copies import Copies, Probe, Rates, bandwidth, d2h, h2d, latency
from deep_opt_states.profiler.peaks import peak_flops
from deep_opt_states.profiler.probes import SUB_GROUPS, HostStates
from deep_opt_states.profiler.ranks import (
    CollectiveGroups,
    ProbeError,
    ProcessGroup,
    Ranks,
    call_on_all_ranks,
    ranks_by_node,
)
from perf_model.prediction.hardware import (
    MATMUL_SIZE,
    QUANTITIES,
    REQUIRED,
    SMALL_MATMUL_SIZE,
    HardwareProfile,
    Measurement,
    ProfileError,
    Provenance,
    matmul_bounds,
    rates_above_limits,
)

Prepare: TypeAlias = Callable[[], Probe] | str
"""A function that prepares a probe; a string is the reason why it cannot run on this machine."""

NO_ACCELERATOR = "no accelerator: training here runs on the CPU"

NO_GROUPS = CollectiveGroups(*["measured by deep-opt-states profile alone"] * 2)
"""The groups when a training run measures, whose plan does not depend on the rates of collectives."""

IMPLAUSIBLE = "implausible: "
"""The start of the reason of a waiver whose cause is noise: a later measurement may succeed."""

CACHE_MULTIPLE = 3
"""The size of the probes' working set, of all ranks of a node together, relative to the last-level caches."""

SMALL_COPY_BYTES, SMALL_HOST_COPY_BYTES = 1024, 4 * 32768
"""The bytes of a copy whose time is the latency. Between host buffers, it is the part that PyTorch gives to each of its
threads (``at::internal::GRAIN_SIZE``): they have to be woken for each copy."""

GATHERED_SHARE, GATHERED_SHARE_ON_CPU = 1 / 2, 1 / 16
"""The whole of a collective relative to a copy: 64 MiB on an accelerator, 8 MiB on the CPU, a quarter if quick."""

CPU_MATRIX_SIZE = 1024
"""The largest matrix on the CPU. It is enough for full speed; with a matrix of GPU size the CPU would need seconds."""


@dataclass(frozen=True, kw_only=True)
class ProbeEffort:
    """The sizes and the number of repetitions of the probes; the defaults are those at the start of training.

    ``budget_s`` is the time for all repetitions of one probe. A rank updates and copies ``update_numel`` and
    ``copy_bytes`` at a time, or more if the caches could hold them. ``launch_numel`` parameters are updated by one
    launch on the accelerator, far longer than the gap between two launches. Matrices have ``matrix_size`` rows.
    """

    warm_ups: int = 1
    min_samples: int = 3
    max_samples: int = 15
    budget_s: float = 0.15
    update_numel: int = 12_000_000
    launch_numel: int = 32_000_000
    copy_bytes: int = 32 * 2**20
    matrix_size: int = MATMUL_SIZE

    def repetitions(self, one_s: float) -> int:
        """Return how many repetitions of ``one_s`` seconds to run."""
        return max(self.min_samples, min(self.max_samples, int(self.budget_s / max(one_s, 1e-9))))


QUICK = ProbeEffort()
FULL = ProbeEffort(
    warm_ups=3,
    min_samples=7,
    max_samples=50,
    budget_s=1.2,
    update_numel=32_000_000,
    launch_numel=64_000_000,
    copy_bytes=128 * 2**20,
)


def sample(prepare: Callable[[], Probe], effort: ProbeEffort, ranks: Ranks) -> list[Rates]:
    """Return the values of the slowest rank for each repetition; the result is the same on all ranks.

    This is a collective. Each repetition starts on all ranks at the same time, so that they load shared resources as
    training does. Raise ``ProbeError`` on every rank if the probe fails on any rank.
    """
    repeat = call_on_all_ranks(ranks, prepare)
    last_s = 0.0
    for _ in range(effort.warm_ups):
        start_s = time.perf_counter()
        call_on_all_ranks(ranks, repeat)
        last_s = time.perf_counter() - start_s
    repetitions = effort.repetitions(max(ranks.gather(last_s)))
    return [_slowest(ranks.gather(call_on_all_ranks(ranks, repeat))) for _ in range(repetitions)]


def _slowest(by_rank: list[Rates]) -> Rates:
    # A latency is a time; all other quantities are rates.
    return {name: (max if name == "copy_latency_s" else min)(rates[name] for rates in by_rank) for name in by_rank[0]}


def training_cpu_adam(num_sub_groups: int, num_threads: int, cores: Sequence[int]) -> AdamKernel:
    """Return the CPU kernel that training uses, each thread pinned to its entry of ``cores`` if there are any.

    The first call on a machine compiles DeepSpeed's op and the plugin's library. Raise DeepSpeed's error if that fails.
    """
    from deep_opt_states.device.kernels.choice import cpu_adam

    return cpu_adam(num_sub_groups, DEFAULT_BETAS, adamw=True, num_threads=num_threads, cores=cores).kernel


def training_gpu_adam() -> AdamKernel:
    """Return the GPU kernel that training uses, compiled for bf16 gradients and parameters.

    Raise ``KernelUnavailable`` if there is no such kernel on this machine.
    """
    from deep_opt_states.device.kernels.choice import gpu_adam

    kernel = gpu_adam(DEFAULT_BETAS, adamw=True)
    kernel.compile([torch.bfloat16], [torch.bfloat16])
    return kernel


def stock_cpu_adam(num_sub_groups: int) -> AdamKernel:
    """Return stock's kernel of three passes, which runs on PyTorch's threads and scales the fp32 gradient in place."""
    from deep_opt_states.device.kernels.stock import StockAdam

    class StockPasses(StockAdam):
        def scaled_gradient(self, grad: torch.Tensor, grad_scale: float) -> torch.Tensor:
            assert grad.dtype == torch.float32
            return grad.mul_(grad_scale)

    return StockPasses(num_sub_groups, DEFAULT_BETAS, adamw=True)


def measure(
    device: Device[Any] | None,
    ranks: Ranks,
    effort: ProbeEffort,
    *,
    threads: int,
    cores: Sequence[int] = (),
    groups: CollectiveGroups = NO_GROUPS,
    progress: Callable[[int, int, str], object] = lambda done, total, quantity: None,
) -> HardwareProfile:
    """Return the profile of this machine with all ``ranks`` at work at the same time; the same on all ranks.

    This is a collective. ``device`` is None if the accelerator is the CPU. ``threads`` threads of this rank update on
    the CPU, pinned to ``cores`` if there are any. ``groups`` are those whose collectives are measured. ``progress`` is
    called with the number of probes that are done, the number of all of them, and a quantity of the next one, and once
    at the end.

    Raise ``ProfileError`` on every rank if a quantity that every prediction needs could not be measured; any other
    quantity that fails is waived with the reason. All memory of the probes is freed, also in PyTorch's caches.
    """
    on_node = max(map(len, ranks_by_node(ranks, os.environ)))
    host: Device[Any] = HostDevice() if device is None else device
    measurements: dict[str, Measurement] = {}
    try:
        with ExitStack() as reserved:
            entries = _entries(device, host, effort, on_node, threads, cores, groups, reserved)
            for done, (quantities, prepare) in enumerate(entries.items()):
                progress(done, len(entries), quantities[0])
                measurements |= _measure(quantities, prepare, effort, ranks)
            progress(len(entries), len(entries), "done")
    finally:
        # The states of training need the memory that the probes used.
        host.release_cached()

    for name in REQUIRED:
        if (why := measurements[name].waived) is not None:
            raise ProfileError(
                f"{name}: is needed for every prediction, found no measurement ({why}).\n"
                f"Find out why this machine cannot measure it: deep-opt-states doctor."
            )

    def about() -> dict[str, Any]:
        gpu = machine.gpu() if device is not None else None
        return {
            "name": platform.node(),
            "provenance": describe(on_accelerator=device is not None, ranks_on_node=on_node, threads=threads),
            "gpu_memory_bytes": gpu.memory_bytes if gpu else None,
            "host_memory_bytes": machine.memory().usable_bytes,
            "gpu_peak_flops": peak_flops(gpu.name) if gpu else None,
        }

    described = ranks.gather(call_on_all_ranks(ranks, about))[0]
    measurements |= noise_waivers(measurements)
    measurements |= matmul_waivers(measurements, described["gpu_memory_bytes"], described["gpu_peak_flops"])
    return HardwareProfile(measurements={name: measurements[name] for name in QUANTITIES}, **described)


def _entries(
    device: Device[Any] | None,
    host: Device[Any],
    effort: ProbeEffort,
    on_node: int,
    threads: int,
    cores: Sequence[int],
    groups: CollectiveGroups,
    reserved: ExitStack,
) -> dict[tuple[str, ...], Prepare]:
    """Return the probes by their quantities, in the order in which they run: the same on all ranks.

    ``host`` allocates host memory. The CPU's probes run one after another in the same memory, which ``reserved`` frees.
    """
    cache_bytes = CACHE_MULTIPLE * (machine.last_level_cache_bytes() or 0) // on_node
    copy_bytes = max(effort.copy_bytes, cache_bytes // 2)  # each direction has such a buffer
    update_numel = max(effort.update_numel, cache_bytes // 16)  # p, m and v in fp32, two tensors in bf16
    rows = min(effort.matrix_size, CPU_MATRIX_SIZE) if device is None else effort.matrix_size
    matrices = {"matmul_flops_per_s": rows, "matmul_small_flops_per_s": min(SMALL_MATMUL_SIZE, rows)}
    small_bytes = SMALL_HOST_COPY_BYTES * torch.get_num_threads() if device is None else SMALL_COPY_BYTES
    gathered_bytes = int(effort.copy_bytes * (GATHERED_SHARE_ON_CPU if device is None else GATHERED_SHARE))

    @cache
    def memory() -> HostStates:
        states = HostStates(host, update_numel, training_cpu_adam(SUB_GROUPS, threads, cores))
        reserved.callback(states.close)
        return states

    def both() -> list[Copies]:
        return [h2d(host, copy_bytes), d2h(host, copy_bytes)]

    def collective(group: ProcessGroup | str, quantity: str, **options: bool) -> Prepare:
        if isinstance(group, str):
            return group
        return lambda: probes.collective(host, group, gathered_bytes, quantity, **options)

    on_device: dict[tuple[str, ...], Prepare] = {
        ("h2d_bytes_per_s",): lambda: bandwidth(host, [h2d(host, copy_bytes)], 2, "h2d_bytes_per_s"),
        ("d2h_bytes_per_s",): lambda: bandwidth(host, [d2h(host, copy_bytes)], 2, "d2h_bytes_per_s"),
        ("both_bytes_per_s",): lambda: bandwidth(host, both(), 4, "both_bytes_per_s"),
        ("pageable_h2d_bytes_per_s",): lambda: bandwidth(
            host, [h2d(host, copy_bytes, pinned=False)], 2, "pageable_h2d_bytes_per_s"
        ),
        (
            "cpu_adam_beside_transfers_params_per_s",
            "both_beside_cpu_adam_bytes_per_s",
        ): lambda: probes.host_updates_during_copies(host, memory(), both()),
        ("gpu_adam_params_per_s",): lambda: probes.device_updates(host, effort.launch_numel, training_gpu_adam()),
    }
    if device is None:
        on_device = dict.fromkeys(on_device, NO_ACCELERATOR)
    return {
        ("copy_latency_s",): lambda: latency(host, h2d(host, small_bytes)),
        ("cpu_adam_params_per_s",): lambda: probes.host_updates(memory()),
        ("stock_cpu_adam_params_per_s",): lambda: probes.stock_updates(stock_cpu_adam(SUB_GROUPS), memory(), host),
        ("dram_update_bytes_per_s", "dram_copy_bytes_per_s"): lambda: probes.host_memory(memory().slab),
        **on_device,
        tuple(matrices): lambda: probes.matrix_products(host, matrices),
        ("all_gather_bytes_per_s",): collective(groups.in_node, "all_gather_bytes_per_s"),
        ("reduce_scatter_bytes_per_s",): collective(groups.in_node, "reduce_scatter_bytes_per_s", reduces=True),
        ("inter_node_bytes_per_s",): collective(groups.across_nodes, "inter_node_bytes_per_s"),
    }


def _measure(quantities: Sequence[str], prepare: Prepare, effort: ProbeEffort, ranks: Ranks) -> dict[str, Measurement]:
    if isinstance(prepare, str):
        return dict.fromkeys(quantities, Measurement(waived=prepare))
    try:
        samples = sample(prepare, effort, ranks)
    except ProbeError as error:
        return dict.fromkeys(quantities, Measurement(waived=str(error)))
    return {name: _plausible(name, [rates[name] for rates in samples]) for name in quantities}


def _plausible(name: str, samples: Sequence[float]) -> Measurement:
    """Return the samples without those that no machine reaches, such as those of a process that was stopped.

    The measurement is waived if half of the samples or more are implausible.
    """
    low, high = QUANTITIES[name].low, QUANTITIES[name].high
    inside = tuple(rate for rate in samples if low <= rate <= high)
    if 2 * len(inside) > len(samples):
        return Measurement(samples=inside)
    return Measurement(waived=f"{IMPLAUSIBLE}the median is {median(samples):.3g}, outside {low:g} to {high:g}")


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


def describe(*, on_accelerator: bool, ranks_on_node: int, threads: int) -> Provenance:
    """Return the provenance of a measurement that is made now on this machine.

    ``threads`` threads per rank update on the CPU, each on a core of its own.
    """
    gpu = machine.gpu() if on_accelerator else None
    return Provenance(
        source="measured",
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        host=platform.node(),
        cpu=machine.cpu_name(),
        cores=threads * ranks_on_node,
        ranks=ranks_on_node,
        gpu=gpu.name if gpu else "",
        driver=machine.driver_version() if gpu else "",
        torch=str(torch.__version__),
        deepspeed=metadata.version("deepspeed"),
    )
