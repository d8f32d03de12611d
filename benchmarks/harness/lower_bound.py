"""The least that an update of ours can take, by a profile of this machine."""

from __future__ import annotations

from benchmarks.harness.setting import Setting
from deep_opt_states.host import machine
from perf_model.prediction.cost import CostModel
from perf_model.prediction.hardware import HardwareProfile
from perf_model.schedule.workload import Workload
from perf_model.search.bounds import Bound, Room, work_bound


def lower_bound(workload: Workload, setting: Setting, profile: HardwareProfile) -> Bound:
    """With residents in all the memory that ``setting`` lets an arm have; the CPU accelerator has none of its own."""
    gpu_bytes = setting.accelerator_bytes if machine.has_cuda() else 0
    return work_bound(setting.parameters, CostModel.of(profile), Room.of(workload, gpu_bytes))
