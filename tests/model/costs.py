"""Cost models for tests; no machine was measured for them."""

from __future__ import annotations

from hypothesis import strategies as st

from perf_model.prediction.cost import CostModel, Resource, traffic_of
from perf_model.prediction.overlap_windows import Windows

PLENTY = 1e15


def cost(**changes: float) -> CostModel:
    """CPU 1 G params/s, PCIe 12 GB/s each way, a GPU and a host memory that do not bind."""
    rates = {
        "cpu": 1e9,
        "gpu": 1e12,
        "h2d": 12e9,
        "d2h": 12e9,
        "both": PLENTY,
        "dram": PLENTY,
        "latency": 0.0,
        **changes,
    }
    return CostModel.of_rates(
        cpu_adam_params_per_s=rates["cpu"],
        gpu_adam_params_per_s=rates["gpu"],
        capacities={
            Resource.H2D: rates["h2d"],
            Resource.D2H: rates["d2h"],
            Resource.BOTH: rates["both"],
            Resource.PAGEABLE: PLENTY,
            Resource.DRAM: rates["dram"],
        },
        traffic=traffic_of(2),
        copy_latency_s=rates["latency"],
    )


costs = st.builds(
    cost,
    cpu=st.floats(1e8, 1e10),
    gpu=st.floats(1e10, 1e12),
    h2d=st.floats(1e9, 5e11),
    d2h=st.floats(1e9, 5e11),
    both=st.floats(1e9, 1e12),
    dram=st.floats(1e10, 1e12),
    latency=st.floats(0, 1e-4),
)

windows = st.builds(Windows, backward_s=st.floats(0, 1), forward_s=st.floats(0, 1))
