"""Check the numbers that a training run reports: to monitors, the log, timers, profilers and the folder of the run."""

from __future__ import annotations

import csv
import json
import re
import sys
import time
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import profiler

from deep_opt_states.cli.main import main
from deep_opt_states.report.folder import RecordedRun
from deep_opt_states.runtime.actions import Actions
from perf_model.schedule.action import Action
from tests.model.profiles import RATES, profile
from tests.ranks import on_ranks
from tests.zero.parity.case import CPU, STRIDE_2, Case
from tests.zero.parity.training import Block, closing_engine, shared_folder, train

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
            with profiler.profile(activities=[profiler.ProfilerActivity.CPU], experimental_config=config) as seen:
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


EVERY_UPDATE = {
    "exposed_s",
    "hidden_s",
    "update_s",
    "params_per_s",
    "cpu_adam_s",
    "h2d_gb_per_s",
    "d2h_gb_per_s",
    "gpu_share",
    "memory_gb",
}
OF_ITERATION = {"iteration_s", "forward_s", "backward_s"}
"""The values of updates that another update follows."""

WHEN_LOGGED = {"predicted_update_s", "predicted_exposed_s"}
UPDATED = [step for step in range(1, STEPS + 1) if step != OVERFLOWS_IN + 1]
"""Steps from 1, as DeepSpeed counts them."""

LOGGED = [step for step in UPDATED if step % LOG_EVERY == 0]


@dataclass(frozen=True)
class MonitoredRun:
    """The observations of both ranks, by subject, and the folder of the monitors."""

    folder: Path
    ranks: list[dict[str, Any]]

    def by_rank(self, key: str) -> list[Any]:
        """Return an observation of each rank."""
        return [found[key] for found in self.ranks]


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> MonitoredRun:
    """Train with all means of observation: monitors, the log, the run's folder, a profiler and DeepSpeed's timers."""
    folder = tmp_path_factory.mktemp("monitored")
    path = folder / "profile.json"
    cpu_rates = {name: rate for name, rate in RATES.items() if name.startswith(("cpu_adam_params", "stock", "dram"))}
    path.write_text(profile(cpu_rates).to_json())
    return MonitoredRun(folder, on_ranks(2, observe, folder, str(path)))


def observe(folder: Path, hardware: str) -> dict[str, Any]:
    with redirect_stdout(StringIO()) as output:
        found = {"monitored": monitored(folder, hardware), "profiled": profiled(), "timed": timed(CPU)}
    return {**found, "output": output.getvalue()}


pytestmark = pytest.mark.xdist_group("monitored training")


def test_every_monitor_gets_the_same_values_on_the_axis_that_deepspeed_uses(
    observed: MonitoredRun,
) -> None:
    folder = observed.folder
    first, second = observed.by_rank("monitored")
    by_name: dict[str, dict[int, float]] = {}
    for step, name, value in first["logged"]:
        by_name.setdefault(name, {})[step] = value
    ours = {name.removeprefix("Train/Update/"): by_name[name] for name in by_name if "/Update/" in name}
    # There is no error of an update of less than a millisecond.
    assert {name for name in ours if not name.endswith("_error")} == EVERY_UPDATE | OF_ITERATION | WHEN_LOGGED
    # The samples of a skipped step count, but the step has no update.
    samples = {step: step * first["batch"] for step in UPDATED}
    # The update before the skipped step and the last one are reported early.
    followed = [step for step in UPDATED if step not in (OVERFLOWS_IN, STEPS)]
    for name, values in ours.items():
        steps = UPDATED if name in EVERY_UPDATE else followed if name in OF_ITERATION else LOGGED
        expected = [samples[step] for step in steps]
        assert list(values) == expected or (name.endswith("_error") and set(values) < set(expected)), name
    assert set(by_name["Train/Samples/lr"]) >= set(ours["exposed_s"])
    for name in ("exposed_s", "update_s", "params_per_s", "cpu_adam_s", "h2d_gb_per_s", "d2h_gb_per_s", "memory_gb"):
        assert min(ours[name].values()) > 0, name
    assert min(ours["hidden_s"].values()) >= 0
    assert all(0 < share < 1 for share in ours["gpu_share"].values())
    for samples_so_far, iteration_s in ours["iteration_s"].items():
        parts_s = [ours[name][samples_so_far] for name in ("exposed_s", "forward_s", "backward_s")]
        assert min(parts_s) > 0
        assert sum(parts_s) == pytest.approx(iteration_s)
    # Rank 1 has no writer.
    assert (first["begun"], second["begun"], second["logged"]) == (1, 0, [])

    for name, values in ours.items():
        rows = list(csv.reader((folder / "csv" / f"Train_Update_{name}.csv").open()))
        assert rows == [["step", name], *([str(step), str(value)] for step, value in values.items())]
    board = EventAccumulator(str(folder / "tensorboard"))
    board.Reload()
    for name, values in ours.items():
        scalars = {event.step: event.value for event in board.Scalars(f"Train/Update/{name}")}
        assert scalars == pytest.approx(values, rel=1e-6)


def test_an_update_is_logged_every_few_steps_whatever_steps_per_print_is(observed: MonitoredRun) -> None:
    first, second = observed.by_rank("output")
    lines = re.findall(r"\[deep_opt_states\] step=(\d+), update exposed=.*", first)
    assert list(map(int, lines)) == LOGGED
    (line, *_) = re.findall(r"\[deep_opt_states\] step=.*", first)
    pattern = (
        r"exposed=\S+ \S+ \(median of 3: .*\), hidden=.*, \S+ M params/s, h2d=\S+ GB/s, d2h=\S+ GB/s, "
        r"CPU Adam=\S+ \S+, GPU share=\d+%"
    )
    assert re.search(pattern, line), line
    assert "step=" not in second


def test_the_run_is_recorded_and_rendered_as_a_page(observed: MonitoredRun, capsys: pytest.CaptureFixture[str]) -> None:
    folder = observed.folder
    first, _ = observed.by_rank("monitored")
    run = RecordedRun.read(folder / "run")
    assert [step["step"] for step in run.steps] == UPDATED
    logged = [value for _, name, value in first["logged"] if name == "Train/Update/exposed_s"]
    assert [step["exposed_s"] for step in run.steps] == logged
    assert sum(run.info.memory_bytes.values()) == first["reserved"]
    assert run.info.world_size == 2
    assert str(run.info.plan) == first["plan"]
    assert run.measured is not None
    assert run.predicted is not None
    names = {action.name for action in run.info.plan.schedule.actions}
    for timeline, _ in (run.measured, run.predicted):
        assert {span.action.name for span in timeline.spans} == names
    assert [row.name for row in run.compared][:2] == ["update", "exposed"]
    assert run.compared_updates == len(UPDATED) - 2
    assert main(["report", str(folder / "run")]) == 0
    assert str(folder / "run" / "report.html") in capsys.readouterr().out
    trace = json.loads((folder / "run" / "timeline.json").read_text())
    assert names <= {event["name"] for event in trace["traceEvents"]}


def test_profilers_show_the_schedule(observed: MonitoredRun) -> None:
    for found in observed.by_rank("profiled"):
        all_threads, this_thread = found["all threads"], found["this thread"]
        # Each action runs once in each of the two steps.
        assert {name: all_threads.get(name) for name in found["schedule"]} == dict.fromkeys(found["schedule"], 2)
        # Actions are issued and run on other threads.
        assert not {name for name in this_thread if name in found["schedule"]}


def test_the_step_timer_of_deepspeed_covers_the_whole_update(observed: MonitoredRun) -> None:
    for found in observed.by_rank("timed"):
        # The last update is reported when the engine is destroyed.
        assert len(found["step_s"]) == len(found["exposed_s"]) == 3
        assert found["deferred"] == 0
        for step_s, exposed_s in zip(found["step_s"], found["exposed_s"], strict=True):
            assert step_s >= exposed_s >= found["least_s"] > 0
    first, _ = observed.by_rank("output")
    assert first.count("times step() with the whole update in it") == 1
