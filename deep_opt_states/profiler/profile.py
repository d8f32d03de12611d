"""Measure the ``HardwareProfile`` of this machine on all ranks at the same time. The slowest rank counts."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache, partial
from importlib import metadata
from statistics import median
from typing import Any, TypeAlias

import torch
from torch.distributed import ProcessGroup

from deep_opt_states.device.cpu import HostDevice
from deep_opt_states.device.interface import Device
from deep_opt_states.device.kernels.adam import DEFAULT_BETAS, STATE_DTYPES, AdamKernel, StateDtypes
from deep_opt_states.device.kernels.choice import cpu_adam, gpu_adam
from deep_opt_states.device.kernels.stock import StockAdam
from deep_opt_states.host import machine
from deep_opt_states.profiler import probes
from deep_opt_states.profiler.peaks import peak_flops
from deep_opt_states.profiler.probes import SUB_GROUPS, Copies, Probe, ProbeError, Rates, d2h, h2d, slowest
from deep_opt_states.profiler.ranks import CollectiveGroups, Ranks, call_on_all_ranks, collective, ranks_by_node
from perf_model.prediction.cost import CPU_ADAM
from perf_model.prediction.hardware import (
    MATMUL_SIZE,
    QUANTITIES,
    REQUIRED,
    HardwareProfile,
    Measurement,
    ProfileError,
    Provenance,
    matmul_bounds,
    rates_above_limits,
)

Prepare: TypeAlias = Callable[[], Probe] | str
"""A function that prepares a probe, or the reason why it cannot run on this machine."""

Entry: TypeAlias = tuple[tuple[str, ...], Prepare]

NO_ACCELERATOR = "no accelerator: training here runs on the CPU"

BY_PROFILE_ALONE = "measured by deep-opt-states profile alone"
"""The reason for quantities on which the plan of training does not depend, so that its start need not wait for them."""

NO_GROUPS = CollectiveGroups(BY_PROFILE_ALONE, BY_PROFILE_ALONE)
"""The groups when training measures."""

IMPLAUSIBLE = "implausible: "
"""The start of the reason of a waiver that is due to noise: a later measurement may succeed."""

CACHE_MULTIPLE = 3
"""The working set of all ranks of a node together, relative to the last-level caches."""

SMALL_COPY_BYTES, SMALL_HOST_COPY_BYTES = 1024, 4 * 32768
"""The bytes of a copy whose time is the latency, on the host per thread of PyTorch (``at::internal::GRAIN_SIZE``)."""

GATHERED_SHARE, GATHERED_SHARE_ON_CPU = 1 / 2, 1 / 16
"""The bytes of a collective relative to a copy's."""

CPU_MATRIX_SIZE = 1024
"""The largest matrix on the CPU. It reaches full speed, while a matrix of GPU size would take seconds."""


@dataclass(frozen=True, kw_only=True)
class ProbeEffort:
    """The sizes and the number of repetitions of the probes. The defaults are for the start of training.

    ``budget_s`` is the time for all repetitions of one probe. ``update_numel`` and ``copy_bytes``, per rank, grow if
    the caches could hold them. One launch on the accelerator updates ``launch_numel`` parameters.
    """

    warm_ups: int = 1
    min_samples: int = 3
    max_samples: int = 15
    budget_s: float = 0.15
    update_numel: int = 12_000_000
    launch_numel: int = 32_000_000
    copy_bytes: int = 32 * 2**20
    matrix_size: int = MATMUL_SIZE


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
    """Return the slowest rank's values for each repetition, which all ranks start together. This is a collective.

    Raise ``ProbeError`` on every rank if the probe fails on any rank.
    """
    repeat = call_on_all_ranks(ranks, prepare)
    last_s = 0.0
    for _ in range(effort.warm_ups):
        start_s = time.perf_counter()
        call_on_all_ranks(ranks, repeat)
        last_s = time.perf_counter() - start_s
    in_budget = int(effort.budget_s / max(1e-9, *ranks.gather(last_s)))
    repetitions = max(effort.min_samples, min(effort.max_samples, in_budget))
    return [slowest(ranks.gather(call_on_all_ranks(ranks, repeat))) for _ in range(repetitions)]


def training_cpu_adam(num_sub_groups: int, num_threads: int, cores: Sequence[int]) -> AdamKernel:
    """Return the CPU kernel that training uses. The first call on a machine compiles it."""
    return cpu_adam(num_sub_groups, DEFAULT_BETAS, adamw=True, num_threads=num_threads, cores=cores).kernel


def training_gpu_adam() -> AdamKernel:
    """Return the GPU kernel that training uses, compiled for bf16. Raise ``KernelUnavailable`` if there is none."""
    kernel = gpu_adam(DEFAULT_BETAS, adamw=True)
    kernel.compile([torch.bfloat16], [torch.bfloat16])
    return kernel


class StockPasses(StockAdam):
    """Stock's kernel of three passes on PyTorch's threads, which scales the fp32 gradient in place."""

    def scaled_gradient(self, grad: torch.Tensor, grad_scale: float, dtype: torch.dtype) -> torch.Tensor:
        assert grad.dtype == dtype
        return grad.mul_(grad_scale)


stock_cpu_adam = partial(StockPasses, betas=DEFAULT_BETAS, adamw=True)


def measure(
    device: Device[Any] | None,
    ranks: Ranks,
    effort: ProbeEffort,
    *,
    threads: int,
    cores: Sequence[int] = (),
    groups: CollectiveGroups = NO_GROUPS,
    progress: Callable[[Collection[Entry]], Iterable[Entry]] = iter,
) -> HardwareProfile:
    """Return the profile of this machine with all ``ranks`` at work at the same time, the same on all ranks.

    This is a collective. ``device`` is None on the CPU accelerator. ``threads`` threads of this rank update on the CPU,
    pinned to ``cores`` if there are any. All memory of the probes is freed, also in PyTorch's caches. Raise
    ``ProfileError`` on every rank if a quantity that every prediction needs cannot be measured.
    """
    on_node = max(map(len, ranks_by_node(ranks, os.environ)))
    host: Device[Any] = HostDevice() if device is None else device
    measurements: dict[str, Measurement] = {}
    try:
        with ExitStack() as reserved:
            entries = _entries(device, host, effort, on_node, threads, cores, groups, reserved)
            for quantities, prepare in progress(entries.items()):
                measurements |= _measure(quantities, prepare, effort, ranks)
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
            "gpu_memory_bytes": gpu.total_memory if gpu else None,
            "host_memory_bytes": machine.memory().usable_bytes,
            "gpu_peak_flops": peak_flops(gpu.name) if gpu else None,
        }

    described = ranks.gather(call_on_all_ranks(ranks, about))[0]
    measurements |= noise_waivers(measurements, described["gpu_memory_bytes"], described["gpu_peak_flops"])
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
    """Return the probes by their quantities, in the same order on all ranks. ``reserved`` frees their host memory."""
    cache_bytes = CACHE_MULTIPLE * (machine.last_level_cache_bytes() or 0) // on_node
    copy_bytes = max(effort.copy_bytes, cache_bytes // 2)  # each direction has such a buffer
    update_numel = max(effort.update_numel, cache_bytes // 8)  # p, m, v and the gradient in bf16
    rows = min(effort.matrix_size, CPU_MATRIX_SIZE) if device is None else effort.matrix_size
    small_bytes = SMALL_HOST_COPY_BYTES * torch.get_num_threads() if device is None else SMALL_COPY_BYTES
    gathered_bytes = int(effort.copy_bytes * (GATHERED_SHARE_ON_CPU if device is None else GATHERED_SHARE))

    @cache
    def memory() -> probes.HostStates:
        states = probes.HostStates(host, update_numel, training_cpu_adam(SUB_GROUPS, threads, cores))
        reserved.callback(states.close)
        return states

    def updates(quantity: str, dtypes: StateDtypes) -> Prepare:
        return lambda: probes.host_updates(memory(), quantity, dtypes)

    def by_threads() -> Probe:
        if isinstance(memory().kernel, StockAdam):
            raise ProbeError("DeepSpeed's kernel updates on the threads of PyTorch")
        counts = [max(1, threads >> halvings) for halvings in range(threads.bit_length())]
        kernels = {count: training_cpu_adam(SUB_GROUPS, count, cores[:count]) for count in counts}
        return probes.sufficient_threads(memory(), kernels)

    def copies(*directions: Callable[..., Copies]) -> list[Copies]:
        return [direction(host, copy_bytes) for direction in directions]

    def bandwidth(quantity: str, *directions: Callable[..., Copies]) -> dict[tuple[str, ...], Prepare]:
        return {(quantity,): lambda: probes.bandwidth(host, copies(*directions), 2 * len(directions), quantity)}

    def gathers(quantity: str, group: ProcessGroup | str, **options: bool) -> dict[tuple[str, ...], Prepare]:
        if isinstance(group, str):
            return {(quantity,): group}
        return {(quantity,): lambda: collective(host, group, gathered_bytes, quantity, **options)}

    on_device: dict[tuple[str, ...], Prepare] = {
        **bandwidth("h2d_bytes_per_s", h2d),
        **bandwidth("d2h_bytes_per_s", d2h),
        **bandwidth("both_bytes_per_s", h2d, d2h),
        **bandwidth("pageable_h2d_bytes_per_s", partial(h2d, pinned=False)),
        ("cpu_adam_beside_transfers_params_per_s", "both_beside_cpu_adam_bytes_per_s"): lambda: (
            probes.host_updates_during_copies(host, memory(), copies(h2d, d2h))
        ),
        ("gpu_adam_params_per_s",): lambda: probes.device_updates(host, effort.launch_numel, training_gpu_adam()),
    }
    if device is None:
        on_device = dict.fromkeys(on_device, NO_ACCELERATOR)
    return {
        ("copy_latency_s",): lambda: probes.latency(host, h2d(host, small_bytes)),
        **{
            (quantity,): updates(quantity, dtypes)
            for quantity, dtypes in zip(CPU_ADAM.values(), STATE_DTYPES, strict=True)
        },
        ("cpu_adam_threads",): BY_PROFILE_ALONE if groups is NO_GROUPS else by_threads,
        ("stock_cpu_adam_params_per_s",): lambda: probes.stock_updates(stock_cpu_adam(SUB_GROUPS), memory(), host),
        ("dram_update_bytes_per_s", "dram_copy_bytes_per_s"): lambda: probes.host_memory(memory().slab),
        **on_device,
        ("matmul_flops_per_s",): lambda: probes.matrix_products(host, rows),
        **gathers("all_gather_bytes_per_s", groups.in_node),
        **gathers("reduce_scatter_bytes_per_s", groups.in_node, reduces=True),
        **gathers("inter_node_bytes_per_s", groups.across_nodes),
    }


def _measure(quantities: Sequence[str], prepare: Prepare, effort: ProbeEffort, ranks: Ranks) -> dict[str, Measurement]:
    """Return the plausible samples of each quantity, or the waiver with the reason."""
    try:
        if isinstance(prepare, str):
            raise ProbeError(prepare)
        by_repetition = sample(prepare, effort, ranks)
    except ProbeError as error:
        return dict.fromkeys(quantities, Measurement(waived=str(error)))
    measured = {}
    for name in quantities:
        samples, (_, low, high) = [rates[name] for rates in by_repetition], QUANTITIES[name]
        inside = tuple(rate for rate in samples if low <= rate <= high)
        why = f"{IMPLAUSIBLE}the median is {median(samples):.3g}, outside {low:g} to {high:g}"
        is_plausible = 2 * len(inside) > len(samples)
        measured[name] = Measurement(samples=inside) if is_plausible else Measurement(waived=why)
    return measured


def noise_waivers(
    measurements: Mapping[str, Measurement], gpu_memory_bytes: int | None = None, peak: float | None = None
) -> dict[str, Measurement]:
    """Return waivers for rates that other load on the machine has falsified. ``peak`` is the GPU's, in FLOP/s."""

    def median_of(name: str) -> float | None:
        found = measurements.get(name)
        return found.median if found and found.samples else None

    reasons = {
        name: f"{rate:.3g}, above {tolerance} times {names} alone, {alone:.3g}"
        for name, rate, names, alone, tolerance in rates_above_limits(median_of)
    }
    rate, (low, high) = median_of("matmul_flops_per_s"), matmul_bounds(gpu_memory_bytes, peak, has_accelerator=True)
    if gpu_memory_bytes is not None and rate is not None and not low <= rate <= high:
        reasons["matmul_flops_per_s"] = f"{rate:.3g} FLOP/s, outside {low:.3g} to {high:.3g}"
    return {name: Measurement(waived=f"{IMPLAUSIBLE}{why}") for name, why in reasons.items()}


def describe(*, on_accelerator: bool, ranks_on_node: int, threads: int) -> Provenance:
    """Return the provenance of a measurement now on this machine, where ``threads`` threads per rank update."""
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
