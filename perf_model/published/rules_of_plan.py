"""Predict published runs by the rules of ``plan``, at the rates that ``validate`` has fitted, as a comparison.

The rules differ twice. ``plan`` simulates an update, in which a copy and a CPU update that exceed host memory's
bandwidth together both slow down; ``validate`` adds up their traffic, as if copies never waited for the CPU. And
``plan`` hides the copies of gradients behind backward, while ``validate`` adds them to it at a rate of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

from perf_model.prediction.cost import BytesPerParam, CostModel, Resource, stock_traffic_by_action, traffic_by_action
from perf_model.prediction.simulate import simulate
from perf_model.published.phase_rates import micro_batch_seconds
from perf_model.published.placements import placements_of, workload_of
from perf_model.published.runs import MeasuredRun, RunSetting, TrainedBatch
from perf_model.published.update_rates import (
    CPU_BYTES,
    STREAMED_BYTES,
    STREAMED_LINK_BYTES,
    link_bytes_per_s,
    machine_of,
)
from perf_model.schedule.action import ActionKind
from perf_model.schedule.lowering import serial_schedule
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.schedule import Schedule
from perf_model.training_run.job import GradientPath
from perf_model.training_run.training_memory import PARAM_BYTES


def simulated_update_s(setting: RunSetting, rates: Mapping[str, float], machine: str) -> float:
    """Return the simulated seconds of the update of a run with ``setting`` on ``machine``.

    The rates are those of ``update_s``, which counts the same bytes.
    """
    link = link_bytes_per_s(machine)
    # The fitted rate of host memory counts the reading of the 16-bit parameter with the CPU's update.
    traffic = dict(stock_traffic_by_action(PARAM_BYTES)) | {
        ActionKind.CPU_STEP: BytesPerParam(dram=CPU_BYTES),
        ActionKind.PUBLISH: BytesPerParam(h2d=PARAM_BYTES, pageable=PARAM_BYTES),
    }
    if setting.update_stride is not None:
        streamed = rates["streamed_bytes_per_param"] / STREAMED_BYTES
        flush = traffic_by_action(PARAM_BYTES)[ActionKind.FLUSH_STATES]
        prefetch = BytesPerParam(h2d=STREAMED_LINK_BYTES - flush.d2h, dram=streamed * (STREAMED_BYTES - flush.dram))
        traffic |= {
            ActionKind.PREFETCH: prefetch,
            ActionKind.FLUSH_STATES: BytesPerParam(d2h=flush.d2h, dram=streamed * flush.dram),
            ActionKind.PUBLISH: BytesPerParam(h2d=PARAM_BYTES),
        }
    cost = CostModel.from_rates(
        cpu_adam_params_per_s=rates["dram_bytes_per_s"] / CPU_BYTES,
        gpu_adam_params_per_s=rates["gpu_adam_params_per_s"],
        capacities={
            Resource.H2D: link,
            Resource.D2H: link,
            Resource.BOTH: machine_of(machine).joint * link,
            Resource.PAGEABLE: rates["pageable_bytes_per_s"],
            Resource.DRAM: rates["dram_bytes_per_s"],
        },
        traffic=traffic,
    )
    return simulate(_schedule_of(setting), workload_of(setting), cost).end_s


def backward_s(run: MeasuredRun, batch: TrainedBatch, rates: Mapping[str, float]) -> float:
    """Return the seconds of backward, which hides the copies of gradients as far as it lasts."""
    link = link_bytes_per_s(run.machine)
    placements = placements_of(run.setting)
    path = GradientPath.for_stock(UpdatePlan(workload=workload_of(run.setting), placements=placements, num_slots=1))
    _, computed_s = micro_batch_seconds(run, batch, rates)
    earlier_s = max(computed_s, (path.accumulated_down_bytes + path.accumulated_up_bytes) / link)
    return (batch.accumulation - 1) * earlier_s + max(computed_s, (path.down_bytes + path.up_bytes) / link)


@cache
def _schedule_of(setting: RunSetting) -> Schedule:
    """Return the schedule of a run, in which one buffer holds one streamed sub-group after another.

    The GPU's own sub-groups come last: their steps wait for the last step of the CPU.
    """
    workload, placements = workload_of(setting), placements_of(setting)
    if setting.update_stride is None:
        return serial_schedule(placements)
    schedule = UpdatePlan(workload=workload, placements=placements, num_slots=1).schedule
    on_cpu = [action.name for action in schedule.actions if action.kind is ActionKind.CPU_STEP]
    offloaded = [action for action in schedule.actions if placements[action.unit] is not Placement.RESIDENT]
    resident = [action for action in schedule.actions if placements[action.unit] is Placement.RESIDENT]
    return replace(schedule, actions=(*offloaded, *(replace(action, waits=tuple(on_cpu[-1:])) for action in resident)))
