"""Hardware profiles of machines by name, from specifications and published runs: no measurements of the user's machine.

Rates are those of one rank with ``ranks`` at work on the node: what the ranks share is divided by their number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from perf_model.prediction.cost import Traffic, stock_traffic_of, traffic_of
from perf_model.prediction.hardware import HardwareProfile, Measurement, Provenance
from perf_model.schedule.action import ActionKind

PARAM_BYTES = 2

_UNMEASURED = "PRESET, not a measurement of your machine"

GPU_ADAM_BYTES_PER_PARAM = 30
"""Device memory: p, m, v and gradient read (16), p, m, v (12) and the 16-bit parameter (2) written."""

GPU_MEMORY_BYTES = {
    "A100-80GB": 81_920 * 2**20,
    "H100-80GB": 81_559 * 2**20,
    "H200-141GB": 143_771 * 2**20,
    "GH200-96GB": 97_871 * 2**20,
}
"""As the driver reports it (``nvidia-smi``, MiB): less than the name says, or more."""

REACHED = 0.8
"""The share of a specified memory or link bandwidth that copies and Adam are taken to reach."""

_SPECIFIED = "link, GPU memory and peak by NVIDIA's and PCI-SIG's specifications, of which 80% are taken to be reached"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One node. Link rates are of one GPU, by specification; ``joint`` is of both directions together.

    ``host_bytes_per_s`` is what all ranks of the node reach together, ``matmul_flops`` what a GPU reaches in training.
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
    source: str

    def profile(self, ranks: int) -> HardwareProfile:
        """With ``ranks`` at work, one a GPU, on the node."""
        link = REACHED * self.link_bytes_per_s
        host = self.host_bytes_per_s / ranks
        rates = {
            "h2d_bytes_per_s": link,
            "d2h_bytes_per_s": link,
            "both_bytes_per_s": self.joint * link,
            "pageable_h2d_bytes_per_s": self.pageable_bytes_per_s,
            "pageable_d2h_bytes_per_s": self.pageable_bytes_per_s,
            "copy_latency_s": 1e-5,
            "cpu_adam_params_per_s": self._cpu_adam_params_per_s(host, traffic_of(PARAM_BYTES), ranks),
            "stock_cpu_adam_params_per_s": self._cpu_adam_params_per_s(host, stock_traffic_of(PARAM_BYTES), ranks),
            "dram_update_bytes_per_s": host,
            "dram_copy_bytes_per_s": host,
            "gpu_adam_params_per_s": REACHED * self.gpu_memory_bytes_per_s / GPU_ADAM_BYTES_PER_PARAM,
            "matmul_flops_per_s": self.matmul_flops,
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

    def _cpu_adam_params_per_s(self, host: float, traffic: Mapping[ActionKind, Traffic], ranks: int) -> float:
        """Host memory binds, or the cores do."""
        return min(host / traffic[ActionKind.CPU_STEP].dram, self.core_params_per_s * self.cores / ranks)


_PCIE_4, _PCIE_5, _NVLINK_C2C = 31.5e9, 63e9, 450e9
"""Bytes a second and direction, 16 lanes, by specification (PCI-SIG; NVIDIA Grace Hopper white paper)."""

_H100 = Machine(
    name="h100-pcie5",
    gpu="H100-80GB",
    gpu_memory_bytes_per_s=3.35e12,
    peak_flops=989e12,
    matmul_flops=310e12,
    link_bytes_per_s=_PCIE_5,
    joint=1.7,
    pageable_bytes_per_s=10e9,
    cores=96,
    core_params_per_s=0.2e9,
    host_bytes_per_s=430e9,
    host_memory_bytes=1024 * 2**30,
    source=f"{_SPECIFIED}; host memory, pageable copies and matrix products fitted to the published runs on "
    "4xH100-80GB; cores, and what both directions reach together, assumed",
)

MACHINES: dict[str, Machine] = {
    machine.name: machine
    for machine in (
        Machine(
            name="a100-pcie4",
            gpu="A100-80GB",
            gpu_memory_bytes_per_s=1.935e12,
            peak_flops=312e12,
            matmul_flops=160e12,
            link_bytes_per_s=_PCIE_4,
            joint=1.7,
            pageable_bytes_per_s=4e9,
            cores=64,
            core_params_per_s=0.2e9,
            host_bytes_per_s=170e9,
            host_memory_bytes=512 * 2**30,
            source=f"{_SPECIFIED}; host memory, pageable copies and matrix products fitted to the published runs on "
            "4xA100-40GB; cores, and what both directions reach together, assumed",
        ),
        _H100,
        replace(
            _H100,
            name="h200-pcie5",
            gpu="H200-141GB",
            gpu_memory_bytes_per_s=4.8e12,
            source=f"{_SPECIFIED}; the rest as in h100-pcie5, assumed to be alike",
        ),
        Machine(
            name="gh200",
            gpu="GH200-96GB",
            gpu_memory_bytes_per_s=4.0e12,
            peak_flops=989e12,
            matmul_flops=310e12,
            link_bytes_per_s=_NVLINK_C2C,
            joint=1.2,
            pageable_bytes_per_s=100e9,
            cores=72,
            core_params_per_s=0.2e9,
            host_bytes_per_s=REACHED * 500e9,
            host_memory_bytes=480 * 10**9,
            source="NVIDIA's specifications (NVLink-C2C, LPDDR5X, HBM3), of which 80% are taken to be reached; matrix "
            "products as in h100-pcie5; pageable copies and what both directions reach together assumed",
        ),
    )
}
