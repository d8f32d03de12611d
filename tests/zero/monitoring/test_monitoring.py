"""Check the numbers that a training run reports: to monitors, the log, timers, profilers and the folder of the run."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from deep_opt_states.cli.main import main
from deep_opt_states.report.folder import RecordedRun
from tests.model.profiles import RATES, profile
from tests.zero.monitoring.monitored_ranks import LOG_EVERY, OVERFLOWS_IN, STEPS
from tests.zero.training_once import ProgramRanks, TrainingOnce, on_one_worker

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


def write_profile(folder: Path) -> list[str]:
    """Return the arguments of the program: a folder, and a hardware profile that is written there."""
    path = folder / "profile.json"
    cpu_rates = {name: rate for name, rate in RATES.items() if name.startswith(("cpu_adam_params", "stock", "dram"))}
    path.write_text(profile(cpu_rates).to_json())
    return [str(folder), str(path)]


RANKS = ProgramRanks("tests.zero.monitoring.monitored_ranks", timeout_s=300, arguments=write_profile)
pytestmark = on_one_worker(RANKS.program)


def answers(trained: TrainingOnce, key: str) -> list[Any]:
    return [answer[key] for answers in trained.answers(2) for answer in answers]


def test_every_monitor_gets_the_same_values_on_the_axis_that_deepspeed_uses(
    trained: TrainingOnce,
) -> None:
    folder = trained.folder(2)
    first, second = answers(trained, "monitored")
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


def test_an_update_is_logged_every_few_steps_whatever_steps_per_print_is(trained: TrainingOnce) -> None:
    first, second = trained.finished(2)
    lines = re.findall(r"\[deep_opt_states\] step=(\d+), update exposed=.*", first.output)
    assert list(map(int, lines)) == LOGGED
    (line, *_) = re.findall(r"\[deep_opt_states\] step=.*", first.output)
    pattern = (
        r"exposed=\S+ \S+ \(median of 3: .*\), hidden=.*, \S+ M params/s, h2d=\S+ GB/s, d2h=\S+ GB/s, "
        r"CPU Adam=\S+ \S+, GPU share=\d+%"
    )
    assert re.search(pattern, line), line
    assert "step=" not in second.output


def test_the_run_is_recorded_and_rendered_as_a_page(trained: TrainingOnce, capsys: pytest.CaptureFixture[str]) -> None:
    folder = trained.folder(2)
    first, _ = answers(trained, "monitored")
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


def test_profilers_show_the_schedule(trained: TrainingOnce) -> None:
    for found in answers(trained, "profiled"):
        all_threads, this_thread = found["all threads"], found["this thread"]
        # Each action runs once in each of the two steps.
        assert {name: all_threads.get(name) for name in found["schedule"]} == dict.fromkeys(found["schedule"], 2)
        # Actions are issued and run on other threads.
        assert not {name for name in this_thread if name in found["schedule"]}


def test_the_step_timer_of_deepspeed_covers_the_whole_update(trained: TrainingOnce) -> None:
    for found in answers(trained, "timed"):
        # The last update is reported when the engine is destroyed.
        assert len(found["step_s"]) == len(found["exposed_s"]) == 3
        assert found["deferred"] == 0
        for step_s, exposed_s in zip(found["step_s"], found["exposed_s"], strict=True):
            assert step_s >= exposed_s >= found["least_s"] > 0
    first, _ = trained.finished(2)
    assert first.output.count("times step() with the whole update in it") == 1
