"""Define hardware profiles of known machines, from specifications and published runs.

They are not measurements of the user's machine. Rates are per rank while all ranks of the node run: the rate of a
shared resource is divided by the number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from perf_model.prediction.cost import BytesPerParam, stock_traffic_by_action, traffic_by_action
from perf_model.prediction.hardware import HardwareProfile, Measurement, Provenance
from perf_model.schedule.action import ActionKind
from perf_model.training_run.job import PARAM_BYTES

_UNMEASURED = "PRESET, not a measurement of your machine"

GPU_ADAM_BYTES_PER_PARAM = 30
"""Bytes per parameter that Adam moves in GPU memory: p, m, v and the gradient are read (16), and p, m, v (12) and the
16-bit parameter (2) are written."""

GPU_MEMORY_BYTES = {
    "A100-80GB": 81_920 * 2**20,
    "H100-80GB": 81_559 * 2**20,
    "H200-141GB": 143_771 * 2**20,
    "GH200-96GB": 97_871 * 2**20,
}
"""GPU memory as the driver reports it (``nvidia-smi``, MiB), which differs from the number in the name."""

REACHED_SHARE = 0.8
"""The share of a specified memory or link bandwidth that copies and Adam are assumed to reach."""

_SPECIFIED = (
    "link, GPU memory and peak by NVIDIA's and PCI-SIG's specifications, 80% of which are assumed to be reached"
)


@dataclass(frozen=True, kw_only=True)
class MachinePreset:
    """The specifications of one node.

    ``link_bytes_per_s`` is per GPU and direction, and ``joint`` is the rate of both directions together as a multiple
    of it. ``host_bytes_per_s`` is the rate of all ranks of the node together, ``core_params_per_s`` the Adam rate per
    core, and ``matmul_flops`` the rate that a GPU reaches in training.
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
        """Return the profile of one rank while ``ranks`` ranks, one per GPU, run on the node."""
        link = REACHED_SHARE * self.link_bytes_per_s
        host = self.host_bytes_per_s / ranks
        rates = {
            "h2d_bytes_per_s": link,
            "d2h_bytes_per_s": link,
            "both_bytes_per_s": self.joint * link,
            "pageable_h2d_bytes_per_s": self.pageable_bytes_per_s,
            "pageable_d2h_bytes_per_s": self.pageable_bytes_per_s,
            "copy_latency_s": 1e-5,
            "cpu_adam_params_per_s": self._cpu_adam_params_per_s(host, traffic_by_action(PARAM_BYTES), ranks),
            "stock_cpu_adam_params_per_s": self._cpu_adam_params_per_s(
                host, stock_traffic_by_action(PARAM_BYTES), ranks
            ),
            "dram_update_bytes_per_s": host,
            "dram_copy_bytes_per_s": host,
            "gpu_adam_params_per_s": REACHED_SHARE * self.gpu_memory_bytes_per_s / GPU_ADAM_BYTES_PER_PARAM,
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

    def _cpu_adam_params_per_s(self, host: float, traffic: Mapping[ActionKind, BytesPerParam], ranks: int) -> float:
        """Return the rate of CPU Adam, which is limited by host memory or by the cores."""
        return min(host / traffic[ActionKind.CPU_STEP].dram, self.core_params_per_s * self.cores / ranks)


_PCIE_4, _PCIE_5, _NVLINK_C2C = 31.5e9, 63e9, 450e9
"""Bytes per second and direction with 16 lanes, by specification (PCI-SIG; NVIDIA Grace Hopper white paper)."""

_H100 = MachinePreset(
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
    "4xH100-80GB; cores and the rate of both directions together are assumed",
)

MACHINES: dict[str, MachinePreset] = {
    machine.name: machine
    for machine in (
        MachinePreset(
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
            "4xA100-40GB; cores and the rate of both directions together are assumed",
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
            matmul_flops=310e12,
            link_bytes_per_s=_NVLINK_C2C,
            joint=1.2,
            pageable_bytes_per_s=100e9,
            cores=72,
            core_params_per_s=0.2e9,
            host_bytes_per_s=REACHED_SHARE * 500e9,
            host_memory_bytes=480 * 10**9,
            source="NVIDIA's specifications (NVLink-C2C, LPDDR5X, HBM3), 80% of which are assumed to be reached; "
            "matrix products as in h100-pcie5; pageable copies and the rate of both directions together are assumed",
        ),
    )
}
