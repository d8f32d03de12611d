"""Check the numbers that a training run reports: to monitors, the log, timers, profilers and the folder of the run."""

from __future__ import annotations

import json
import re
import sys
import time
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.utils import nvtx
from deepspeed.utils.config import DeepSpeedThroughputTimerConfig
from torch import profiler

from deep_opt_states.cli.main import main
from deep_opt_states.report.folder import RecordedRun
from deep_opt_states.zero.internals import compat, spans
from perf_model.prediction.timeline import Phase, seconds_of
from perf_model.schedule.placement import Placement
from tests.kernels.intercepted import before_each_update
from tests.model.profiles import RATES, profile
from tests.ranks import on_ranks
from tests.zero.parity.case import STRIDE_2, Case
from tests.zero.parity.training import closing_engine, shared_folder, train

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
    extra = {"steps_per_print": 2, "wandb": {"enabled": True}}
    poisoned = {OVERFLOWS_IN: float("inf")}
    case = Case(name="monitored", blocks=(), world_size=2, steps=STEPS, poisoned=poisoned, extra=extra)
    wandb = sys.modules["wandb"] = Wandb()
    block = {**STRIDE_2, "log_every": LOG_EVERY, "profile": hardware, "report": str(folder / "run")}
    with shared_folder() as checkpoints, closing_engine(case, block) as engine:
        train(engine, case, checkpoints)
        reserved = sum(reservation.each_bytes for reservation in engine.optimizer.accounting_device.reserved)
        found = {"reserved": reserved, "plan": str(engine.optimizer.plan), "batch": engine.train_batch_size()}
    return {**found, "begun": wandb.begun, "logged": wandb.logged}


def all_threads() -> Any:
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    return profiler.profile(activities=[profiler.ProfilerActivity.CPU], experimental_config=config)


def timed() -> dict[str, Any]:
    case = Case(name="timed", blocks=(), world_size=2, steps=1, extra={"wall_clock_breakdown": True})
    step_s: list[float] = []
    exposed_s: list[float] = []
    slowed = before_each_update(lambda update: time.sleep(SLOWED_S))
    with slowed, closing_engine(case, STRIDE_2) as engine, shared_folder() as folder:
        report, updated = engine.optimizer.report, engine.optimizer.report.updated

        def record_exposed(phases: Any, timeline: Any) -> None:
            exposed_s.append(seconds_of(Phase.EXPOSED, phases))
            updated(phases, timeline)

        report.updated = record_exposed
        with all_threads() as seen:
            for _ in range(2):
                assert train(engine, case, folder).deferred == 0
                step_s.append(engine.get_wall_clock_timers()["step"] / 1e3)
        plan = engine.optimizer.plan
    # The last update is reported when the engine is destroyed.
    return {
        "seconds": list(zip(step_s, exposed_s, strict=True)),
        "least_s": SLOWED_S * plan.placements.count(Placement.CPU),
        "schedule": [action.name for action in plan.schedule.actions],
        "events": {event.key: event.count for event in seen.key_averages()},
    }


ALWAYS_POSITIVE = {"exposed_s", "update_s", "params_per_s", "cpu_adam_s", "h2d_gb_per_s", "d2h_gb_per_s", "memory_gb"}
EVERY_UPDATE = ALWAYS_POSITIVE | {"hidden_s", "gpu_share", "last_backward_s"}
FOLLOWED = {"iteration_s", "forward_s", "backward_s"}

WHEN_LOGGED = {"predicted_update_s", "predicted_exposed_s"}
UPDATED = [step for step in range(1, STEPS + 1) if step != OVERFLOWS_IN + 1]

LOGGED = [step for step in UPDATED if step % LOG_EVERY == 0]
Observed = tuple[Path, list[dict[str, Any]]]
"""The folder of the run, and the observations of both ranks, by subject."""


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Observed:
    folder = tmp_path_factory.mktemp("monitored")
    path = folder / "profile.json"
    cpu_rates = {name: rate for name, rate in RATES.items() if name.startswith(("cpu_adam_params", "stock", "dram"))}
    path.write_text(profile(cpu_rates).to_json())
    return folder, on_ranks(2, observe, folder, str(path))


def observe(folder: Path, hardware: str) -> dict[str, Any]:
    with redirect_stdout(StringIO()) as output:
        return {"monitored": monitored(folder, hardware), "timed": timed(), "output": output.getvalue()}


pytestmark = pytest.mark.xdist_group("monitored training")


def test_monitors_get_the_values_of_each_update_on_the_axis_that_deepspeed_uses(observed: Observed) -> None:
    first, second = (found["monitored"] for found in observed[1])
    by_name: dict[str, dict[int, float]] = {}
    for step, name, value in first["logged"]:
        by_name.setdefault(name, {})[step] = value
    ours = {name.removeprefix("Train/Update/"): by_name[name] for name in by_name if "/Update/" in name}
    # There is no error of an update of less than a millisecond.
    assert {name for name in ours if not name.endswith("_error")} == EVERY_UPDATE | FOLLOWED | WHEN_LOGGED
    # The samples of a skipped step count, but the step has no update.
    samples = {step: step * first["batch"] for step in UPDATED}
    # The update before the skipped step and the last one are reported early.
    followed = [step for step in UPDATED if step not in (OVERFLOWS_IN, STEPS)]
    for names, steps in ((EVERY_UPDATE, UPDATED), (FOLLOWED, followed), (WHEN_LOGGED, LOGGED)):
        assert all(list(ours[name]) == [samples[step] for step in steps] for name in names)
    assert set(by_name["Train/Samples/lr"]) >= set(ours["exposed_s"])
    assert all(min(ours[name].values()) > 0 for name in ALWAYS_POSITIVE)
    assert min(ours["hidden_s"].values()) >= 0
    assert all(0 < share < 1 for share in ours["gpu_share"].values())
    for samples_so_far, iteration_s in ours["iteration_s"].items():
        parts_s = [ours[name][samples_so_far] for name in ("exposed_s", "forward_s", "backward_s")]
        assert min(parts_s) > 0
        assert sum(parts_s) == pytest.approx(iteration_s)
    # Rank 1 has no writer.
    assert (first["begun"], second["begun"], second["logged"]) == (1, 0, [])


def test_an_update_is_logged_every_few_steps_whatever_steps_per_print_is(observed: Observed) -> None:
    first, second = (found["output"] for found in observed[1])
    pattern = (
        r"\[deep_opt_states\] step=(\d+), update exposed=.*, hidden=.* M params/s, h2d=\S+ GB/s, .*, GPU share=\d+%"
    )
    assert list(map(int, re.findall(pattern, first))) == LOGGED
    assert "(median of 3: " in first
    assert "step=" not in second


def test_the_run_is_recorded_and_rendered_as_a_page(observed: Observed, capsys: pytest.CaptureFixture[str]) -> None:
    folder, first = observed[0] / "run", observed[1][0]["monitored"]
    run = RecordedRun.read(folder)
    assert [step["step"] for step in run.steps] == UPDATED
    logged = [value for _, name, value in first["logged"] if name == "Train/Update/exposed_s"]
    assert [step["exposed_s"] for step in run.steps] == logged
    assert sum(run.info.memory_bytes.values()) == first["reserved"]
    assert (run.info.world_size, str(run.info.plan)) == (2, first["plan"])
    names = {action.name for action in run.info.plan.schedule.actions}
    for recorded in (run.measured, run.predicted):
        assert recorded is not None
        assert {span.action.name for span in recorded[0].spans} == names
    assert [row.name for row in run.compared][:2] == ["update", "exposed"]
    assert run.compared_updates == len(UPDATED) - 2
    assert main(["report", str(folder)]) == 0
    assert str(folder / "report.html") in capsys.readouterr().out
    trace = json.loads((folder / "timeline.json").read_text())
    assert names <= {event["name"] for event in trace["traceEvents"]}


def test_profilers_show_the_schedule_and_the_step_timer_covers_the_whole_update(observed: Observed) -> None:
    for found in (found["timed"] for found in observed[1]):
        # Each action runs once in each of the two steps.
        assert {name: found["events"].get(name) for name in found["schedule"]} == dict.fromkeys(found["schedule"], 2)
        assert all(step_s >= exposed_s >= found["least_s"] > 0 for step_s, exposed_s in found["seconds"])
    assert observed[1][0]["output"].count("times step() with the whole update in it") == 1


def test_a_profiler_may_be_started_and_stopped_inside_a_span() -> None:
    started = all_threads()
    with spans.ActionSpan("begun before"):
        started.start()
    with spans.ActionSpan("inside"):
        pass
    with spans.ActionSpan("ended after"):
        started.stop()
    assert "inside" in [event.name for event in started.events()]


@pytest.mark.parametrize("named", [{"domain": "DeepSpeed"}, {}])
def test_a_span_is_in_the_domain_of_deepspeed_and_ends_if_its_action_fails(named: dict[str, str]) -> None:
    accelerator = mock.Mock(supports_nvtx_domain=bool(named))
    with mock.patch.object(spans, "get_accelerator", return_value=accelerator):
        with pytest.raises(OSError, match="out of memory"), spans.ActionSpan("CPU_STEP 4"):
            raise OSError("out of memory")
        with mock.patch.object(nvtx, "enable_nvtx", False), spans.ActionSpan("PUBLISH 4"):
            pass
    assert accelerator.mock_calls == [mock.call.range_push("CPU_STEP 4", **named), mock.call.range_pop(**named)]


def test_the_timer_waits_for_the_device_only_if_the_user_requests_it() -> None:
    for throughput, synchronized, warnings in (({}, False, 0), ({"synchronized": True}, True, 1)):
        timer = DeepSpeedThroughputTimerConfig(**throughput)
        config = SimpleNamespace(_param_dict={"timers": {"throughput": throughput}}, timers_config=timer)
        with mock.patch("deep_opt_states.log.warn") as log:
            compat.unsynchronize_throughput_timer(config)
        assert timer.synchronized == synchronized
        assert log.call_count == warnings
