"""Define hardware profiles of known machines, from specifications and published runs.

They are not measurements of the user's machine. Rates are per rank while all ranks of the node run: the rate of a
shared resource is divided by the number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from perf_model.prediction.cost import (
    GPU_STEP_BYTES,
    BytesPerParam,
    stock_traffic_by_action,
    traffic_by_action,
)
from perf_model.prediction.hardware import MATMUL_SIZE, SMALL_MATMUL_SIZE, HardwareProfile, Measurement, Provenance
from perf_model.schedule.action import ActionKind
from perf_model.training_run.micro_batch import TRAINING_SHARE, MatrixRate
from perf_model.training_run.training_memory import PARAM_BYTES

_UNMEASURED = "PRESET, not a measurement of your machine"

_GPU_MEMORY_MIB = {
    "RTX-3090-24GB": 24_576,
    "RTX-4090-24GB": 24_564,
    "RTX-5090-32GB": 32_607,
    "L40S-48GB": 46_068,
    "A10G-24GB": 23_028,
    "RTX-A6000-48GB": 49_140,
    "A100-40GB": 40_960,
    "A100-80GB": 81_920,
    "H100-80GB": 81_559,
    "H200-141GB": 143_771,
    "B200-180GB": 183_359,
    "GH200-96GB": 97_871,
    "MI300X-192GB": 196_592,
}
GPU_MEMORY_BYTES = {gpu: mib * 2**20 for gpu, mib in _GPU_MEMORY_MIB.items()}
"""GPU memory as the driver reports it (``nvidia-smi`` or ``rocm-smi``), which differs from the number in the name."""

REACHED_SHARE = 0.8
"""The share of a specified memory or link bandwidth that copies and Adam are assumed to reach."""

HALF_ELEMENTS = 6.6e6
"""The elements of an activation with which forward reaches half of its limit: fitted to the published runs on 4xH100
with 1 to 4 sequences of 2,048 tokens, and assumed for every GPU."""

_MATMUL_SHARE = 0.5
"""The share of a specified peak that matrix products are assumed to reach in training at most. The fits to the
published runs give 0.49 on H100 and 0.61 on A100."""

_SPECIFIED = (
    "link, GPU memory and peak by NVIDIA's and PCI-SIG's specifications, 80% of which are assumed to be reached"
)
_ASSUMED = (
    "host memory and cores of a common server with this GPU, pageable copies, matrix products at 50% of the peak, "
    "network and the rate of both directions together are assumed"
)


@dataclass(frozen=True, kw_only=True)
class MachinePreset:
    """The specifications of one node.

    ``link_bytes_per_s`` is per GPU and direction, and ``joint`` is the rate of both directions together as a multiple
    of it. ``pageable_bytes_per_s`` is the most that pageable copies reach on a fast link. ``host_bytes_per_s`` is the
    rate of all ranks of the node together, ``core_params_per_s`` the Adam rate per core, and ``matmul_flops`` the rate
    that a GPU reaches in training with large micro-batches. ``peer_link_bytes_per_s`` is the rate at which a GPU
    receives from the other GPUs of the node, None if it is connected to them by the links to the host alone.
    ``network_bytes_per_s`` is its share of the rate at which the node receives from other nodes.
    """

    name: str
    gpu: str
    gpu_memory_bytes_per_s: float
    peak_flops: float
    matmul_flops: float
    link_bytes_per_s: float
    joint: float
    pageable_bytes_per_s: float
    cores: int
    core_params_per_s: float
    host_bytes_per_s: float
    host_memory_bytes: int
    peer_link_bytes_per_s: float | None
    network_bytes_per_s: float
    source: str

    @property
    def peer_bytes_per_s(self) -> float:
        """Return the rate at which a GPU receives from the other GPUs of the node."""
        if self.peer_link_bytes_per_s is not None:
            return self.peer_link_bytes_per_s
        # A byte goes up from one GPU and down to the other.
        return REACHED_SHARE * self.link_bytes_per_s / 2

    def profile(self, ranks: int) -> HardwareProfile:
        """Return the profile of one rank while ``ranks`` ranks, one per GPU, run on the node."""
        link_bytes_per_s = REACHED_SHARE * self.link_bytes_per_s
        pageable_bytes_per_s = min(self.pageable_bytes_per_s, link_bytes_per_s)
        host_bytes_per_s = self.host_bytes_per_s / ranks
        rates = {
            "h2d_bytes_per_s": link_bytes_per_s,
            "d2h_bytes_per_s": link_bytes_per_s,
            "both_bytes_per_s": self.joint * link_bytes_per_s,
            "pageable_h2d_bytes_per_s": pageable_bytes_per_s,
            "pageable_d2h_bytes_per_s": pageable_bytes_per_s,
            "copy_latency_s": 1e-5,
            "cpu_adam_params_per_s": self._cpu_adam_params_per_s(
                host_bytes_per_s, traffic_by_action(PARAM_BYTES), ranks
            ),
            "stock_cpu_adam_params_per_s": self._cpu_adam_params_per_s(
                host_bytes_per_s, stock_traffic_by_action(PARAM_BYTES), ranks
            ),
            "dram_update_bytes_per_s": host_bytes_per_s,
            "dram_copy_bytes_per_s": host_bytes_per_s,
            "gpu_adam_params_per_s": REACHED_SHARE * self.gpu_memory_bytes_per_s / GPU_STEP_BYTES,
            "matmul_flops_per_s": self._matmul_flops_per_s(MATMUL_SIZE),
            "matmul_small_flops_per_s": self._matmul_flops_per_s(SMALL_MATMUL_SIZE),
            "all_gather_bytes_per_s": self.peer_bytes_per_s,
            "reduce_scatter_bytes_per_s": self.peer_bytes_per_s,
            "inter_node_bytes_per_s": self.network_bytes_per_s,
        }
        return HardwareProfile(
            name=self.name,
            provenance=Provenance(
                source=f"{_UNMEASURED}: {self.source}", gpu=self.gpu, cores=self.cores // ranks, ranks=ranks
            ),
            measurements={name: Measurement(samples=(rate,)) for name, rate in rates.items()},
            gpu_memory_bytes=GPU_MEMORY_BYTES[self.gpu],
            host_memory_bytes=self.host_memory_bytes,
            gpu_peak_flops=self.peak_flops,
        )

    def _matmul_flops_per_s(self, size: int) -> float:
        """Return the rate of single products with which training reaches ``matmul_flops``."""
        limit = self.matmul_flops / TRAINING_SHARE
        return MatrixRate(limit_flops_per_s=limit, half_elements=HALF_ELEMENTS).flops_per_s(size**2)

    def _cpu_adam_params_per_s(
        self, host_bytes_per_s: float, traffic: Mapping[ActionKind, BytesPerParam], ranks: int
    ) -> float:
        """Return the rate of CPU Adam, which is limited by host memory or by the cores."""
        return min(host_bytes_per_s / traffic[ActionKind.CPU_STEP].dram, self.core_params_per_s * self.cores / ranks)


_PCIE_4, _PCIE_5, _NVLINK_C2C = 31.5e9, 63e9, 450e9
"""Bytes per second and direction with 16 lanes, by specification (PCI-SIG; NVIDIA Grace Hopper white paper)."""

_GBIT = 1e9 / 8
_TB = 10**12

_A100 = MachinePreset(
    name="a100-pcie4",
    gpu="A100-80GB",
    gpu_memory_bytes_per_s=1.935e12,
    peak_flops=312e12,
    matmul_flops=190e12,
    link_bytes_per_s=_PCIE_4,
    joint=1.7,
    pageable_bytes_per_s=5.1e9,
    cores=64,
    core_params_per_s=0.2e9,
    host_bytes_per_s=172e9,
    host_memory_bytes=512 * 2**30,
    peer_link_bytes_per_s=REACHED_SHARE * 300e9,
    network_bytes_per_s=200 * _GBIT,
    source=f"{_SPECIFIED}; host memory, pageable copies and matrix products fitted to the published runs on "
    "4xA100-40GB; NVLink 3 and one 200 Gb/s adapter per GPU as in a DGX A100; cores and the rate of both directions "
    "together are assumed",
)
_H100 = MachinePreset(
    name="h100-pcie5",
    gpu="H100-80GB",
    gpu_memory_bytes_per_s=3.35e12,
    peak_flops=989e12,
    matmul_flops=480e12,
    link_bytes_per_s=_PCIE_5,
    joint=1.7,
    pageable_bytes_per_s=7.9e9,
    cores=96,
    core_params_per_s=0.2e9,
    host_bytes_per_s=476e9,
    host_memory_bytes=1024 * 2**30,
    peer_link_bytes_per_s=REACHED_SHARE * 450e9,
    network_bytes_per_s=400 * _GBIT,
    source=f"{_SPECIFIED}; host memory, pageable copies and matrix products fitted to the published runs on "
    "4xH100-80GB; NVLink 4 and one 400 Gb/s adapter per GPU as in a DGX H100; cores and the rate of both directions "
    "together are assumed",
)


class _Host(NamedTuple):
    """The host of a preset, by specification; ``bytes_per_s`` are those of its memory."""

    cores: int
    bytes_per_s: float
    memory_bytes: int


_DESKTOP = _Host(cores=16, bytes_per_s=89.6e9, memory_bytes=128 * 2**30)
"""A desktop: 16 cores, two channels of DDR5-5600 and 128 GiB."""

_SERVER = _Host(cores=64, bytes_per_s=307.2e9, memory_bytes=512 * 2**30)
"""A server: 64 cores, eight channels of DDR5-4800 and 512 GiB."""


def _with_pcie(
    name: str,
    gpu: str,
    *,
    gpu_memory_bytes_per_s: float,
    peak_flops: float,
    link_bytes_per_s: float,
    host: _Host,
    source: str,
    peer_link_bytes_per_s: float | None = None,
    network_bytes_per_s: float = 25 * _GBIT,
) -> MachinePreset:
    """Return a machine that no run is known of; by default, its GPUs exchange data through host memory."""
    return MachinePreset(
        name=name,
        gpu=gpu,
        gpu_memory_bytes_per_s=gpu_memory_bytes_per_s,
        peak_flops=peak_flops,
        matmul_flops=_MATMUL_SHARE * peak_flops,
        link_bytes_per_s=link_bytes_per_s,
        joint=1.7,
        pageable_bytes_per_s=5.1e9 if link_bytes_per_s == _PCIE_4 else 8.7e9,
        cores=host.cores,
        core_params_per_s=0.2e9,
        host_bytes_per_s=REACHED_SHARE * host.bytes_per_s,
        host_memory_bytes=host.memory_bytes,
        peer_link_bytes_per_s=peer_link_bytes_per_s,
        network_bytes_per_s=network_bytes_per_s,
        source=f"{source}, 80% of which are assumed to be reached; {_ASSUMED}",
    )


MACHINES: dict[str, MachinePreset] = {
    machine.name: machine
    for machine in (
        _A100,
        replace(
            _A100,
            name="a100-40gb",
            gpu="A100-40GB",
            gpu_memory_bytes_per_s=1.555e12,
        ),
        replace(
            _A100,
            name="a100-40gb-nodes",
            gpu="A100-40GB",
            gpu_memory_bytes_per_s=1.555e12,
            matmul_flops=200e12,
            pageable_bytes_per_s=4e9,
            host_bytes_per_s=117e9,
            network_bytes_per_s=1.7e9,
            source=f"{_SPECIFIED}; 4 GPUs per node; host memory, pageable copies, matrix products and network fitted "
            "to the iterations, and not to single phases, of the published stock runs on A100-40GB-nodes with 1 to 16 "
            "ranks; NVLink 3 as in a DGX A100; cores, the size of host memory and the rate of both directions together "
            "are assumed",
        ),
        _H100,
        replace(
            _H100,
            name="h200-pcie5",
            gpu="H200-141GB",
            gpu_memory_bytes_per_s=4.8e12,
            source=f"{_SPECIFIED}; the rest is assumed to be as in h100-pcie5",
        ),
        MachinePreset(
            name="gh200",
            gpu="GH200-96GB",
            gpu_memory_bytes_per_s=4.0e12,
            peak_flops=989e12,
            matmul_flops=480e12,
            link_bytes_per_s=_NVLINK_C2C,
            joint=1.2,
            pageable_bytes_per_s=100e9,
            cores=72,
            core_params_per_s=0.2e9,
            host_bytes_per_s=REACHED_SHARE * 500e9,
            host_memory_bytes=480 * 10**9,
            peer_link_bytes_per_s=REACHED_SHARE * 450e9,
            network_bytes_per_s=400 * _GBIT,
            source="NVIDIA's specifications (NVLink-C2C, LPDDR5X, HBM3), 80% of which are assumed to be reached; "
            "matrix products as in h100-pcie5; pageable copies, network and the rate of both directions together are "
            "assumed",
        ),
        _with_pcie(
            "b200",
            "B200-180GB",
            gpu_memory_bytes_per_s=8e12,
            peak_flops=2250e12,
            link_bytes_per_s=_PCIE_5,
            host=_Host(cores=112, bytes_per_s=716.8e9, memory_bytes=2 * _TB),
            peer_link_bytes_per_s=REACHED_SHARE * 900e9,
            network_bytes_per_s=400 * _GBIT,
            source="NVIDIA's specifications of DGX B200 (HBM3e, NVLink 5, 16 channels of DDR5-5600)",
        ),
        _with_pcie(
            "mi300x",
            "MI300X-192GB",
            gpu_memory_bytes_per_s=5.3e12,
            peak_flops=1307e12,
            link_bytes_per_s=_PCIE_5,
            host=_Host(cores=192, bytes_per_s=921.6e9, memory_bytes=2 * _TB),
            peer_link_bytes_per_s=REACHED_SHARE * 448e9,
            network_bytes_per_s=400 * _GBIT,
            source="AMD's specifications of MI300X (HBM3, 7 Infinity Fabric links of 64 GB/s) and of EPYC 9654",
        ),
        _with_pcie(
            "l40s",
            "L40S-48GB",
            gpu_memory_bytes_per_s=864e9,
            peak_flops=362e12,
            link_bytes_per_s=_PCIE_4,
            source="NVIDIA's datasheet of L40S (GDDR6, PCIe 4)",
            host=_SERVER,
        ),
        _with_pcie(
            "a6000",
            "RTX-A6000-48GB",
            gpu_memory_bytes_per_s=768e9,
            peak_flops=154.8e12,
            link_bytes_per_s=_PCIE_4,
            source="NVIDIA's datasheet of RTX A6000 (GDDR6, PCIe 4)",
            host=_SERVER,
        ),
        _with_pcie(
            "a10g",
            "A10G-24GB",
            gpu_memory_bytes_per_s=600e9,
            peak_flops=70e12,
            link_bytes_per_s=_PCIE_4,
            host=_Host(cores=96, bytes_per_s=409.6e9, memory_bytes=768 * 2**30),
            source="Amazon's description of g5.48xlarge and NVIDIA's datasheet of A10 (GDDR6, PCIe 4)",
        ),
        _with_pcie(
            "rtx3090",
            "RTX-3090-24GB",
            gpu_memory_bytes_per_s=936e9,
            peak_flops=71e12,
            link_bytes_per_s=_PCIE_4,
            source="NVIDIA's Ampere GA102 white paper (GDDR6X, PCIe 4)",
            host=_DESKTOP,
        ),
        _with_pcie(
            "rtx4090",
            "RTX-4090-24GB",
            gpu_memory_bytes_per_s=1008e9,
            peak_flops=165.2e12,
            link_bytes_per_s=_PCIE_4,
            source="NVIDIA's Ada white paper (GDDR6X, PCIe 4)",
            host=_DESKTOP,
        ),
        _with_pcie(
            "rtx5090",
            "RTX-5090-32GB",
            gpu_memory_bytes_per_s=1792e9,
            peak_flops=209.5e12,
            link_bytes_per_s=_PCIE_5,
            source="NVIDIA's RTX Blackwell white paper (GDDR7, PCIe 5)",
            host=_DESKTOP,
        ),
    )
}

ALIASES = {"a100-80gb": "a100-pcie4", "h100": "h100-pcie5", "h200": "h200-pcie5"}
"""Further names of machines in ``MACHINES``."""


def find_machine(name: str) -> MachinePreset | None:
    """Return the preset of that name or alias, or None."""
    return MACHINES.get(ALIASES.get(name, name))
