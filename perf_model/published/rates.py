"""Define the rates of a machine that can be inferred from published runs, and predict updates with them."""

from __future__ import annotations

from dataclasses import dataclass

from perf_model.prediction.cost import BytesPerParam, CostModel, Resource, stock_traffic_by_action, traffic_by_action
from perf_model.prediction.simulate import simulate
from perf_model.published.runs import RunSetting
from perf_model.published.schedules import schedule_of, workload_of
from perf_model.schedule.action import ActionKind
from perf_model.training_run.job import PARAM_BYTES

STOCK_TRAFFIC = stock_traffic_by_action(PARAM_BYTES)
_OUR_TRAFFIC = traffic_by_action(PARAM_BYTES)
ARTIFACT_TRAFFIC = {
    **_OUR_TRAFFIC,
    ActionKind.CPU_STEP: STOCK_TRAFFIC[ActionKind.CPU_STEP],
    # p, m, v and the fp32 gradient are copied up. Before, the host scales the gradient in place: 4 bytes read and 4
    # written.
    ActionKind.PREFETCH: BytesPerParam(h2d=16, dram=16 + 8),
}


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The rates of one rank while all ranks of the node run. ``link_bytes_per_s`` is per direction of PCIe."""

    dram_bytes_per_s: float
    pageable_bytes_per_s: float
    link_bytes_per_s: float
    gpu_adam_params_per_s: float

    def update_s(self, setting: RunSetting) -> float:
        """Return the predicted seconds of the update of a run with ``setting``."""
        traffic = STOCK_TRAFFIC if setting.update_stride is None else ARTIFACT_TRAFFIC
        return simulate(schedule_of(setting), workload_of(setting), self._cost(traffic)).end_s

    def _cost(self, traffic: dict[ActionKind, BytesPerParam]) -> CostModel:
        return CostModel.from_rates(
            # The CPU update is limited by host memory: alone, it uses the full bandwidth.
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
    """Return the rate at which the link becomes the limit.

    Streaming one sub-group then takes as long as the traffic of host memory in a whole stride.
    """
    streamed = ARTIFACT_TRAFFIC[ActionKind.PREFETCH].h2d + ARTIFACT_TRAFFIC[ActionKind.FLUSH_STATES].d2h
    on_cpu = ARTIFACT_TRAFFIC[ActionKind.CPU_STEP].dram + ARTIFACT_TRAFFIC[ActionKind.PUBLISH].dram
    return dram_bytes_per_s * streamed / (stride * on_cpu)
