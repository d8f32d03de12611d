"""The rates of a machine that published runs let us infer, and the update that they predict."""

from __future__ import annotations

from dataclasses import dataclass

from perf_model.prediction.cost import CostModel, Resource, Traffic, stock_traffic_of, traffic_of
from perf_model.prediction.simulate import simulate
from perf_model.published.runs import Setting
from perf_model.published.schedules import schedule_of, workload_of
from perf_model.schedule.action import ActionKind

PARAM_BYTES = 2
STOCK_TRAFFIC = stock_traffic_of(PARAM_BYTES)
_OURS = traffic_of(PARAM_BYTES)
ARTIFACT_TRAFFIC = {
    **_OURS,
    ActionKind.CPU_STEP: STOCK_TRAFFIC[ActionKind.CPU_STEP],
    # p, m, v and the fp32 gradient, which the host has scaled in place before it goes up: 4 bytes read and 4 written.
    ActionKind.PREFETCH: Traffic(h2d=16, dram=16 + 8),
}


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Of one rank, with all ranks of the node at work. ``link``: each direction of PCIe."""

    dram_bytes_per_s: float
    pageable_bytes_per_s: float
    link_bytes_per_s: float
    gpu_adam_params_per_s: float

    def update_s(self, setting: Setting) -> float:
        """What the simulation predicts."""
        traffic = STOCK_TRAFFIC if setting.update_stride is None else ARTIFACT_TRAFFIC
        return simulate(schedule_of(setting), workload_of(setting), self._cost(traffic)).end_s

    def _cost(self, traffic: dict[ActionKind, Traffic]) -> CostModel:
        return CostModel.of_rates(
            # Host memory binds the CPU's update: alone, it takes all of the bandwidth.
            cpu_adam_params_per_s=self.dram_bytes_per_s / traffic[ActionKind.CPU_STEP].dram,
            gpu_adam_params_per_s=self.gpu_adam_params_per_s,
            capacities={
                Resource.H2D: self.link_bytes_per_s,
                Resource.D2H: self.link_bytes_per_s,
                Resource.BOTH: 2 * self.link_bytes_per_s,
                Resource.PAGEABLE: self.pageable_bytes_per_s,
                Resource.DRAM: self.dram_bytes_per_s,
            },
            traffic=traffic,
        )


def binding_link_bytes_per_s(dram_bytes_per_s: float, stride: int) -> float:
    """A link with which streaming one sub-group takes longer than host memory does for a whole stride."""
    streamed = ARTIFACT_TRAFFIC[ActionKind.PREFETCH].h2d + ARTIFACT_TRAFFIC[ActionKind.FLUSH_STATES].d2h
    on_cpu = ARTIFACT_TRAFFIC[ActionKind.CPU_STEP].dram + ARTIFACT_TRAFFIC[ActionKind.PUBLISH].dram
    return dram_bytes_per_s * streamed / (stride * on_cpu)
