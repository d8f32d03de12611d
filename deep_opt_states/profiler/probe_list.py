"""List the probes of a machine: how each is prepared, and which quantities it measures or why it cannot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from deep_opt_states.device.interface import Device
from deep_opt_states.device.kernels.adam import AdamKernel
from deep_opt_states.host import machine
from deep_opt_states.profiler import transfers
from deep_opt_states.profiler.adam_throughput import DeviceUpdates, HostUpdates, HostUpdatesDuringTransfers
from deep_opt_states.profiler.collectives import AllGather, ReduceScatter
from deep_opt_states.profiler.host_bandwidth import HostCopy, HostCopyLatency, UpdateInPlace
from deep_opt_states.profiler.host_states import HostStates
from deep_opt_states.profiler.matrix import MatrixProducts
from deep_opt_states.profiler.method import Probe, ProbeEffort
from deep_opt_states.profiler.process_groups import CollectiveGroup, CollectiveGroups
from deep_opt_states.profiler.provenance import Node
from perf_model.prediction.hardware import SMALL_MATMUL_SIZE

NO_ACCELERATOR = "no accelerator: training here runs on the CPU"

NO_GROUPS = CollectiveGroups.none("measured by deep-opt-states profile alone")
"""The groups when a training run measures, whose plan does not depend on the rates of collectives."""

CACHE_MULTIPLE = 3
"""The size of the probes' working set, of all ranks of a node together, relative to the last-level caches."""

SMALL_COPY_BYTES = 1024

GATHERED_SHARE, GATHERED_SHARE_ON_CPU = 1 / 2, 1 / 16
"""The whole of a collective relative to a copy: 64 MiB on an accelerator, 8 MiB on the CPU, a quarter if quick."""

CPU_MATRIX_SIZE = 1024
"""The largest matrix on the CPU. It is enough for full speed; with a matrix of GPU size the CPU would need seconds."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A probe with the quantities that it measures.

    ``prepare`` creates the probe; it is a string, the reason, if the probe cannot run on this machine.
    """

    title: str
    quantities: tuple[str, ...]
    prepare: Callable[[], Probe] | str


@dataclass(frozen=True)
class Kernels:
    """Factories of the Adam kernels; ``cpu`` takes the number of threads, and their cores."""

    cpu: Callable[[int, Sequence[int]], AdamKernel]
    stock: Callable[[], AdamKernel]
    device: Callable[[], AdamKernel]


class Probes:
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
        kernels: Kernels,
        groups: CollectiveGroups,
        reserved: ExitStack,
    ) -> None:
        self._device = device
        self._host = host
        self._threads = threads
        self._cores = cores
        self._kernels = kernels
        self._groups = groups
        self._reserved = reserved
        cache_bytes = CACHE_MULTIPLE * (machine.last_level_cache_bytes() or 0) // node.ranks
        self._copy_bytes = max(effort.copy_bytes, cache_bytes // 2)  # each direction has such a buffer
        self._update_numel = max(effort.update_numel, cache_bytes // 16)  # p, m and v in fp32, two tensors in bf16
        self._launch_numel = effort.launch_numel
        on_cpu = device is None
        self._matrix_size = min(effort.matrix_size, CPU_MATRIX_SIZE) if on_cpu else effort.matrix_size
        self._gathered_bytes = int(effort.copy_bytes * (GATHERED_SHARE_ON_CPU if on_cpu else GATHERED_SHARE))

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
            _entry("Matrix products", self._matrix_products, "matmul_flops_per_s", "matmul_small_flops_per_s"),
            self._collective("All-gather in a node", AllGather, self._groups.in_node, "all_gather_bytes_per_s"),
            self._collective(
                "Reduce-scatter in a node", ReduceScatter, self._groups.in_node, "reduce_scatter_bytes_per_s"
            ),
            self._collective("All-gather across nodes", AllGather, self._groups.across_nodes, "inter_node_bytes_per_s"),
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

    def _matrix_products(self) -> Probe:
        return MatrixProducts(self._host, self._matrix_size, min(SMALL_MATMUL_SIZE, self._matrix_size))

    def _collective(
        self, title: str, probe: type[AllGather | ReduceScatter], group: CollectiveGroup | str, quantity: str
    ) -> Entry:
        if isinstance(group, str):
            return _entry(title, group, quantity)
        return _entry(title, lambda: probe(self._host, group, self._gathered_bytes, quantity), quantity)


def _entry(title: str, prepare: Callable[[], Probe] | str, *quantities: str) -> Entry:
    return Entry(title=title, quantities=quantities, prepare=prepare)
