"""Create the reporter of an engine's updates, and describe the run that it reports on."""

from __future__ import annotations

import weakref
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from deep_opt_states.config import Config
from deep_opt_states.device.cuda import reserved_bytes
from deep_opt_states.host.machine import process_bytes
from deep_opt_states.names import __version__
from deep_opt_states.report.folder import RunWriter
from deep_opt_states.report.line import MonitorEvents, ProgressLine, ReportSink, SlowCpu, UpdateReporter
from deep_opt_states.report.record import ReportedPlan, RunInfo
from deep_opt_states.runtime.accounting import AccountingDevice
from deep_opt_states.zero.start.assembly import Assembly
from perf_model.prediction.cost import CostModel, stock_speed_up
from perf_model.prediction.hardware import HardwareProfile
from perf_model.prediction.memory import MemoryKind, total_reserved
from perf_model.prediction.simulate import simulate
from perf_model.schedule.host_layout import Widths
from perf_model.schedule.lowering import serial_schedule
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Workload


class EngineProgress:
    """The step counts of a DeepSpeed engine and its monitor; it keeps no engine alive."""

    def __init__(self, engine: Any) -> None:
        self._engine = weakref.ref(engine)
        self._monitor = engine.monitor
        self._progress = 0, 0
        self._plan: UpdatePlan

    def progress(self) -> tuple[int, int]:
        """Return the engine's steps and samples; the last known ones if the engine no longer exists."""
        if (engine := self._engine()) is not None:
            self._progress = engine.global_steps, engine.global_samples
        return self._progress

    def make_report(self, config: Config, assembly: Assembly) -> UpdateReporter:
        """Return the reporter of the updates that run on ``assembly``. Ranks above 0 only log slow CPU updates."""
        self._plan = assembly.running.plan
        sinks: list[ReportSink] = [SlowCpu()]
        if dist.get_rank() == 0:
            sinks.append(ProgressLine())
            if self._monitor.enabled:
                sinks.append(MonitorEvents(self._monitor.write_events))
            if config.report is not None:
                began = datetime.now().astimezone().isoformat(timespec="seconds")
                describe = partial(self._describe, assembly.context.device, began)
                sinks.append(RunWriter(Path(config.report), describe))
        return UpdateReporter(_reported_plan(assembly), sinks, self.progress, config.log_every)

    def plan_changed(self, report: UpdateReporter, assembly: Assembly) -> None:
        """Report the next updates with the plan that ``assembly`` runs now."""
        self._plan = assembly.running.plan
        report.change_plan(_reported_plan(assembly))

    def _describe(self, device: AccountingDevice, began: str) -> RunInfo:
        memory_bytes = {MemoryKind.PINNED.value: 0, MemoryKind.ACCELERATOR.value: 0}
        for reservation in device.reserved:
            memory_bytes[reservation.kind.value] += reservation.count * reservation.each_bytes
        name = get_accelerator().device_name()
        return RunInfo(
            began=began,
            world_size=dist.get_world_size(),
            accelerator=name if name == "cpu" else f"{name} ({torch.cuda.get_device_name()})",
            software={
                "deep_opt_states": __version__,
                "deepspeed": deepspeed.__version__,
                "torch": str(torch.__version__),
            },
            plan=self._plan,
            memory_bytes=memory_bytes,
        )


def _memory_bytes() -> int | None:
    return process_bytes() if get_accelerator().device_name() == "cpu" else reserved_bytes()


def _stock_update_s(profile: HardwareProfile | None, widths: Widths, workload: Workload) -> float | None:
    """Return the predicted seconds of stock's update with all states in host memory, None without its rate."""
    if profile is None or profile.get("stock_cpu_adam_params_per_s") is None or workload.on_disk_numel:
        return None
    schedule = serial_schedule((Placement.CPU,) * len(workload.units))
    simulated_s = simulate(schedule, workload, CostModel.for_stock(profile, widths)).end_s
    # A full profile has the rate of the whole step, with norm, unscaling and the search for inf.
    if (step_params_per_s := profile.get("stock_step_params_per_s")) is None:
        return simulated_s
    return max(simulated_s, workload.numel / (stock_speed_up(widths) * step_params_per_s))


def _reported_plan(assembly: Assembly) -> ReportedPlan:
    exposure = assembly.running.exposure
    planned, plan, widths = assembly.planned, assembly.running.plan, assembly.context.setup.widths
    return ReportedPlan(
        plan=plan,
        widths=widths,
        predict=None if planned.predict is None else partial(planned.predict, plan, assembly.running.uses),
        read_windows=assembly.running.windows.windows,
        read_iteration=lambda: exposure.iteration,
        read_memory_bytes=_memory_bytes,
        predict_stock=partial(_stock_update_s, planned.profile, widths, plan.workload),
        description=[
            *planned.at_end(plan, widths),
            f"memory of rank 0: {total_reserved(assembly.context.device.reserved)}",
        ],
    )
