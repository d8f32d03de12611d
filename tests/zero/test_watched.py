"""What is seen of a run while it trains: DeepSpeed's monitor and log, its timers, profilers, the run's folder."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from deep_opt_states.cli import main
from deep_opt_states.report.run_data import Run
from tests.launch import Finished, run_ranks
from tests.model.profiles import RATES, profile
from tests.zero.scripts.watched import OVERFLOWS_IN, STEPS, STEPS_PER_PRINT

EVERY_UPDATE = {
    "exposed_s",
    "hidden_s",
    "update_s",
    "params_per_s",
    "cpu_adam_s",
    "h2d_gb_per_s",
    "d2h_gb_per_s",
    "gpu_share",
}
WHEN_PRINTED = {f"predicted_{what}_{of}" for what in ("update", "exposed") for of in ("s", "error")}
UPDATED = [step for step in range(1, STEPS + 1) if step != OVERFLOWS_IN + 1]
"""Steps from 1, as DeepSpeed counts them."""

PRINTED = [step for step in UPDATED if step % STEPS_PER_PRINT == 0]

pytestmark = pytest.mark.xdist_group("watched")
"""All of it is trained once."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Finished]]:
    folder = tmp_path_factory.mktemp("watched")
    path = folder / "profile.json"
    of_a_cpu = {name: rate for name, rate in RATES.items() if name.startswith(("cpu_adam_params", "stock", "dram"))}
    path.write_text(profile(of_a_cpu).to_json())
    finished = run_ranks(2, ["-m", "tests.zero.scripts.watched", str(folder), str(path)], timeout_s=300)
    for rank in finished:
        assert rank.returncode == 0, rank.output[-5000:]
    return folder, finished


def answers(finished: list[Finished], what: str) -> list[Any]:
    return [answer[what] for rank in finished for answer in rank.answers()]


def test_every_monitor_gets_the_same_numbers_on_the_axis_of_deepspeed_s_own(
    trained: tuple[Path, list[Finished]],
) -> None:
    folder, finished = trained
    first, second = answers(finished, "monitored")
    by_name: dict[str, dict[int, float]] = {}
    for step, name, value in first["logged"]:
        by_name.setdefault(name, {})[step] = value
    ours = {name.removeprefix("Train/Update/"): by_name[name] for name in by_name if "/Update/" in name}
    assert set(ours) == EVERY_UPDATE | WHEN_PRINTED
    # A skipped step counts in the samples, and has no update.
    samples = {step: step * first["batch"] for step in UPDATED}
    for name, values in ours.items():
        assert list(values) == [samples[step] for step in (UPDATED if name in EVERY_UPDATE else PRINTED)], name
    assert set(by_name["Train/Samples/lr"]) >= set(ours["exposed_s"])
    for name in ("exposed_s", "update_s", "params_per_s", "cpu_adam_s", "h2d_gb_per_s", "d2h_gb_per_s"):
        assert min(ours[name].values()) > 0, name
    assert min(ours["hidden_s"].values()) >= 0
    assert all(0 < share < 1 for share in ours["gpu_share"].values())
    # Rank 1 has no writer at all.
    assert (first["begun"], second["begun"], second["logged"]) == (1, 0, [])

    for name, values in ours.items():
        rows = list(csv.reader((folder / "csv" / f"Train_Update_{name}.csv").open()))
        assert rows == [["step", name], *([str(step), str(value)] for step, value in values.items())]
    board = EventAccumulator(str(folder / "tensorboard"))
    board.Reload()
    for name, values in ours.items():
        scalars = {event.step: event.value for event in board.Scalars(f"Train/Update/{name}")}
        assert scalars == pytest.approx(values, rel=1e-6)


def test_the_log_has_a_line_when_deepspeed_prints(trained: tuple[Path, list[Finished]]) -> None:
    _, (first, second) = trained
    lines = re.findall(r"\[deep_opt_states\] step=(\d+), update exposed=.*", first.output)
    assert list(map(int, lines)) == PRINTED
    (line, *_) = re.findall(r"\[deep_opt_states\] step=.*", first.output)
    pattern = (
        r"exposed=\S+ \S+ \(median of 3: .*\), hidden=.*, \S+ M params/s, h2d=\S+ GB/s, d2h=\S+ GB/s, "
        r"CPU Adam=\S+ \S+, GPU share=\d+%"
    )
    assert re.search(pattern, line), line
    assert "step=" not in second.output


def test_the_run_is_written_and_becomes_a_page(
    trained: tuple[Path, list[Finished]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, finished = trained
    first, _ = answers(finished, "monitored")
    run = Run.read(folder / "run")
    assert [step["step"] for step in run.steps] == UPDATED
    logged = [value for _, name, value in first["logged"] if name == "Train/Update/exposed_s"]
    assert [step["exposed_s"] for step in run.steps] == logged
    assert sum(run.about.memory_bytes.values()) == first["reserved"]
    assert run.about.world_size == 2
    assert str(run.about.plan) == first["plan"]
    assert run.measured is not None
    assert run.predicted is not None
    names = {action.name for action in run.about.plan.schedule.actions}
    for timeline, _ in (run.measured, run.predicted):
        assert {span.action.name for span in timeline.spans} == names
    assert [row.what for row in run.compared][:2] == ["update", "of it exposed"]
    assert run.compared_updates == len(UPDATED) - 2
    assert main(["report", str(folder / "run")]) == 0
    assert str(folder / "run" / "report.html") in capsys.readouterr().out
    trace = json.loads((folder / "run" / "timeline.json").read_text())
    assert names <= {event["name"] for event in trace["traceEvents"]}


def test_profilers_show_the_schedule(trained: tuple[Path, list[Finished]]) -> None:
    _, finished = trained
    for found in answers(finished, "profiled"):
        of_all, of_one = found["all threads"], found["this thread"]
        # Two steps.
        assert {name: of_all.get(name) for name in found["schedule"]} == dict.fromkeys(found["schedule"], 2)
        # The worker is another thread.
        on_streams = {name for name in found["schedule"] if not name.startswith("CPU_STEP")}
        assert {name for name in of_one if name in found["schedule"]} == on_streams


def test_deepspeed_s_step_timer_covers_all_of_the_update(trained: tuple[Path, list[Finished]]) -> None:
    _, finished = trained
    for found in answers(finished, "timed"):
        # The last update is told when the engine is destroyed.
        assert len(found["step_s"]) == len(found["exposed_s"]) == 3
        assert found["deferred"] == 0
        for step_s, exposed_s in zip(found["step_s"], found["exposed_s"], strict=True):
            assert step_s >= exposed_s >= found["least_s"] > 0
    assert finished[0].output.count('"wall_clock_breakdown": true times step() with all of the update in it') == 1
