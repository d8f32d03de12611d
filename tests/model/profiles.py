"""A hardware profile and training runs for tests. They describe no measured machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perf_model.prediction.hardware import REQUIRED, HardwareProfile, Measurement, Provenance
from perf_model.training_run.job import Job
from perf_model.training_run.model import ModelShape

RATES = {
    "h2d_bytes_per_s": 25e9,
    "d2h_bytes_per_s": 26e9,
    "both_bytes_per_s": 42e9,
    "pageable_h2d_bytes_per_s": 8e9,
    "copy_latency_s": 1e-5,
    "cpu_adam_params_per_s": 1.5e9,
    "cpu_adam_beside_transfers_params_per_s": 1.2e9,
    "both_beside_cpu_adam_bytes_per_s": 38e9,
    "stock_cpu_adam_params_per_s": 1.0e9,
    "dram_update_bytes_per_s": 80e9,
    "dram_copy_bytes_per_s": 85e9,
    "gpu_adam_params_per_s": 8e10,
}


def job(shape: ModelShape, world_size: int = 1, ranks_per_node: int | None = None, **more: Any) -> Job:
    """Return a job with one sequence of 2048 tokens per rank, on one node unless ``ranks_per_node`` says otherwise."""
    ranks = {"world_size": world_size, "ranks_per_node": ranks_per_node or world_size}
    return Job(**{"shape": shape, **ranks, "micro_batch": 1, "sequence": 2048, **more})


def profile(rates: Mapping[str, float | None] = RATES) -> HardwareProfile:
    return HardwareProfile(
        name="test",
        provenance=Provenance(source="made up for a test", ranks=1),
        measurements={
            name: Measurement(waived="no accelerator") if rate is None else Measurement(samples=(rate,))
            for name, rate in rates.items()
        },
        gpu_memory_bytes=80 * 10**9,
    )


CPU_ONLY = profile({**{name: RATES[name] for name in REQUIRED}, "matmul_flops_per_s": 1e12})
