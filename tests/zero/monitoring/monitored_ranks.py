"""Train with all means of observation: monitors, the log, the run's folder, a profiler and DeepSpeed's timers.

Arguments: a folder for their output, and a hardware profile. Every rank prints an answer.
"""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from deep_opt_states.runtime.actions import Actions
from perf_model.schedule.action import Action
from tests.launch import answer
from tests.zero.parity.case import CPU, STRIDE_2, Case
from tests.zero.parity.training import Block, closing_engine, shared_folder, train
from tests.zero.process_group import process_group

STEPS, LOG_EVERY, OVERFLOWS_IN = 7, 3, 4
SLOWED_S = 0.02


class Wandb(ModuleType):
    """The functions of W&B that DeepSpeed calls, with W&B's rule that data of a step before the last one is dropped."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.begun = 0
        self.step = 0
        self.logged: list[tuple[int, str, float]] = []

    def init(self, **kwargs: Any) -> None:
        self.begun += 1

    def log(self, data: dict[str, float], step: int, commit: bool | None) -> None:
        assert step >= self.step, f"W&B drops {data}: step {step} after {self.step}"
        self.step = step
        self.logged += [(step, name, float(value)) for name, value in data.items()]


def monitored(folder: Path, hardware: str) -> dict[str, Any]:
    """Train with all monitors and return the data of W&B, the reserved bytes and the plan.

    The block contains ``report`` in addition to a rule. One of the seven steps overflows.
    """
    case = Case(
        name="watched",
        blocks=(),
        world_size=dist.get_world_size(),
        steps=STEPS,
        poisoned={OVERFLOWS_IN: float("inf")},
        extra={
            "steps_per_print": 2,
            "csv_monitor": {"enabled": True, "output_path": str(folder), "job_name": "csv"},
            "tensorboard": {"enabled": True, "output_path": str(folder), "job_name": "tensorboard"},
            "wandb": {"enabled": True},
        },
    )
    wandb = sys.modules["wandb"] = Wandb()
    block = {**STRIDE_2, "log_every": LOG_EVERY, "profile": hardware, "report": str(folder / "run")}
    with shared_folder() as checkpoints, closing_engine(case, block) as engine:
        train(engine, case, checkpoints)
        reserved = sum(reservation.each_bytes for reservation in engine.optimizer.accounting_device.reserved)
        plan = str(engine.optimizer.plan)
    return {
        "begun": wandb.begun,
        "logged": wandb.logged,
        "reserved": reserved,
        "plan": plan,
        "batch": engine.train_batch_size(),
    }


def profiled() -> dict[str, Any]:
    """Return the names of the actions, and the events of profilers of all threads and of this thread alone."""
    case = Case(name="profiled", blocks=(), world_size=dist.get_world_size(), steps=2)
    found: dict[str, Any] = {}
    every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with closing_engine(case, STRIDE_2) as engine, shared_folder() as folder:
        found["schedule"] = [action.name for action in engine.optimizer.plan.schedule.actions]
        train(engine, case, folder)
        for scope, config in (("all threads", every_thread), ("this thread", None)):
            with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as seen:
                train(engine, case, folder)
                engine.optimizer._update.wait()
            found[scope] = {event.key: event.count for event in seen.key_averages()}
    return found


def timed(block: Block) -> dict[str, Any]:
    """Return the seconds of DeepSpeed's ``step`` timer and the exposed seconds, both for each step."""
    case = Case(
        name="timed",
        blocks=(),
        world_size=dist.get_world_size(),
        steps=1,
        extra={"wall_clock_breakdown": True},
    )
    step_s, exposed_s, deferred = [], [], 0
    with slow_updates(), closing_engine(case, block) as engine, shared_folder() as folder:
        report = engine.optimizer.report
        updated = report.updated

        def record_exposed(phases: Any, timeline: Any) -> None:
            exposed_s.append(sum(span.end_s - span.start_s for span in phases if span.phase.value == "exposed update"))
            updated(phases, timeline)

        report.updated = record_exposed
        for _ in range(3):
            deferred += train(engine, case, folder).deferred
            step_s.append(engine.get_wall_clock_timers()["step"] / 1e3)
        on_cpu = [placement.value for placement in engine.optimizer.plan.placements].count("cpu")
    return {"step_s": step_s, "exposed_s": exposed_s, "deferred": deferred, "least_s": SLOWED_S * on_cpu}


@contextmanager
def slow_updates() -> Any:
    """Delay every unit's CPU update, so that a timer that does not cover the updates is noticed."""
    cpu_step = Actions._cpu_step

    def slow(self: Actions, action: Action) -> None:
        time.sleep(SLOWED_S)
        cpu_step(self, action)

    with mock.patch.object(Actions, "_cpu_step", slow):
        yield


def main(folder: str, hardware: str) -> None:
    answer(
        {
            "rank": dist.get_rank(),
            "monitored": monitored(Path(folder), hardware),
            "profiled": profiled(),
            "timed": timed(CPU),
        }
    )


if __name__ == "__main__":
    with process_group():
        main(*sys.argv[1:])
