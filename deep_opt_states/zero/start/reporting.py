"""What reports ask of DeepSpeed's engine: how far it is, how often it prints, and its monitor."""

from __future__ import annotations

import weakref
from datetime import datetime
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

import deep_opt_states
from deep_opt_states.config import Config
from deep_opt_states.report.monitor_events import MonitorEvents
from deep_opt_states.report.progress_line import ProgressLine
from deep_opt_states.report.record import Progress
from deep_opt_states.report.reporter import Outlet
from deep_opt_states.report.run_data import About
from deep_opt_states.report.run_writer import RunFolder
from deep_opt_states.runtime.accounting import Ledger
from deep_opt_states.zero.internals.log import say
from perf_model.prediction.memory import Where
from perf_model.schedule.plan import UpdatePlan


def describe(plan: UpdatePlan, ledger: Ledger) -> About:
    """Of a run that begins."""
    memory_bytes = dict.fromkeys((where.value for where in (Where.PINNED, Where.ACCELERATOR)), 0)
    for its in ledger.reserved:
        memory_bytes[its.where.value] += its.count * its.each_bytes
    accelerator = get_accelerator()
    name = accelerator.device_name()
    return About(
        began=datetime.now().astimezone().isoformat(timespec="seconds"),
        world_size=dist.get_world_size(),
        accelerator=f"{name} ({torch.cuda.get_device_name()})" if name == "cuda" else name,
        software={
            "deep_opt_states": deep_opt_states.__version__,
            "deepspeed": deepspeed.__version__,
            "torch": str(torch.__version__),
        },
        plan=plan,
        memory_bytes=memory_bytes,
    )


class Training:
    """Does not keep the engine alive, and with it the model: reports are kept until the process ends."""

    def __init__(self, engine: Any) -> None:
        self._engine = weakref.ref(engine)
        self._steps_per_print: float | None = engine.steps_per_print()
        self._monitor = engine.monitor
        self._progress = Progress(step=0, samples=0)

    def progress(self) -> Progress:
        if (engine := self._engine()) is not None:
            self._progress = Progress(step=engine.global_steps, samples=engine.global_samples)
        return self._progress

    def outlets(self, config: Config, about: About) -> list[Outlet]:
        """For the rank that speaks."""
        outlets: list[Outlet] = []
        if self._steps_per_print is not None:
            outlets.append(ProgressLine(self._steps_per_print, say))
        if self._monitor.enabled:
            outlets.append(MonitorEvents(self._steps_per_print, self._monitor.write_events))
        if config.report is not None:
            outlets.append(RunFolder(Path(config.report), self._steps_per_print, about))
        return outlets
