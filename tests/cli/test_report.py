"""``deep-opt-states report``: the page of a run has the run's numbers, and can be read, in a real browser."""

from __future__ import annotations

import html
import json
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from deep_opt_states.cli import main
from deep_opt_states.report.comparison import Predicted
from deep_opt_states.report.record import Progress, UpdateRecord, Work
from deep_opt_states.report.reporter import WARM_UPDATES, UpdateReport
from deep_opt_states.report.run_data import About, Run, RunError
from deep_opt_states.report.run_writer import RunFolder
from perf_model.prediction.cost import CostModel
from perf_model.prediction.overlap_windows import Windows
from perf_model.prediction.simulate import simulate
from perf_model.prediction.timeline import Phase, PhaseSpan, Span, Timeline, seconds_of
from perf_model.schedule.action import Lane
from perf_model.schedule.placement import place_by_stride
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Workload
from tests.browser import browsing, find_browser
from tests.model.profiles import profile

WORKLOAD = Workload.of([30_000_000] * 7 + [12_345_678])
PLAN = UpdatePlan(workload=WORKLOAD, placements=place_by_stride(WORKLOAD, 2), num_slots=2)
HOSTILE = '<img src=http://example.invalid/x onerror=alert(1)> & "quoted" {{ 7 * 7 }} 💥'
ABOUT = About(
    began="2026-01-02T03:04:05+00:00",
    world_size=4,
    accelerator=HOSTILE,
    software={"deepspeed": "0.19.8"},
    plan=PLAN,
    memory_bytes={"pinned": 3_210_000_000, "accelerator": 720_000_000},
)
UPDATES, EVERY = 9, 4


def predicted(windows: Windows) -> Predicted:
    timeline = simulate(PLAN.schedule, WORKLOAD, CostModel.of(profile(), 2), windows)
    return Predicted(timeline, windows.exposed_s(timeline, WORKLOAD), windows.phases(timeline, WORKLOAD))


def train(folder: Path, updates: int = UPDATES, predict: bool = True) -> UpdateReport:
    """As a training run would write it; each update takes another time."""
    steps = count(1)
    said: list[str] = []
    report = UpdateReport(
        Work(numel=WORKLOAD.numel, gpu_share=0.5, numels=[its.numel for its in WORKLOAD.sub_groups], param_bytes=2),
        predicted if predict else None,
        [RunFolder(folder, EVERY, ABOUT)],
        lambda: Progress(step := next(steps), 8 * step),
        said.append,
    )
    for number in range(updates):
        windows = Windows(backward_s=0.02 + 0.001 * number, forward_s=0.03 + 0.002 * number)
        its, slower = predicted(windows), 1 + 0.05 * number
        timeline = Timeline(
            tuple(Span(span.action, slower * span.start_s, slower * span.end_s) for span in its.timeline.spans)
        )
        phases = [PhaseSpan(span.phase, slower * span.start_s, slower * span.end_s) for span in its.phases]
        report.updated(phases, lambda timeline=timeline: timeline)
    return report


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / HOSTILE.replace("/", "-")
    train(folder).close()
    return folder


TABLES = """[...document.querySelectorAll('table')].map(table => [
    table.caption.innerText,
    [...table.tBodies[0].rows].map(row => [
        row.cells[0].innerText,
        [...row.querySelectorAll('data')].map(its => [Number(its.value), its.innerText]),
    ]),
])"""


@pytest.mark.skipif(find_browser() is None, reason="no Chromium here: apt-get install chromium-headless-shell")
def test_a_browser_shows_the_numbers_of_the_run_and_its_pictures(run: Path) -> None:
    assert main(["report", str(run)]) == 0
    about = json.loads((run / "run.json").read_text())
    steps = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()][WARM_UPDATES:]
    browser = find_browser()
    assert browser is not None
    with browsing(browser) as page:
        for width in (1280, 390):
            page.open(run / "report.html", width)
            assert page.evaluate("document.title") == page.evaluate("document.querySelector('h1').innerText")
            assert page.evaluate("document.title") == f"Updates of {run.name}"
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert page.evaluate("innerWidth") == width
            images = "[...document.images].map(its => [its.naturalWidth, its.naturalHeight, its.width, its.alt])"
            pictures = page.evaluate(images)
            assert len(pictures) == 2
            for natural_width, natural_height, shown_width, alt in pictures:
                assert natural_width > 500
                assert natural_height > 100
                assert shown_width > 800, "narrower, its labels cannot be read"
                assert "exposed" in alt
        tables: dict[str, Any] = dict(page.evaluate(TABLES))
        text = page.evaluate("document.body.innerText")
        # Dark on light, as it is drawn.
        colours = page.evaluate(
            "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
        )
        assert colours == ["rgb(27, 31, 36)", "rgb(255, 255, 255)"]
        # What scrolls can be reached by keyboard, and has a name.
        frames = "[...document.querySelectorAll('.wide')].map(its => [its.tabIndex, its.ariaLabel.length > 0])"
        assert set(map(tuple, page.evaluate(frames))) == {(0, True)}
    assert page.complaints == []
    # Of two windows.
    assert page.requests == [(run / "report.html").as_uri()] * 2
    assert HOSTILE in text, "as text"

    updates = dict(tables["Updates"])
    for row, key in (
        ("exposed: the model waits", "exposed_s"),
        ("hidden beside backward and forward", "hidden_s"),
        ("from the decision to the end", "update_s"),
        ("CPU Adam", "cpu_adam_s"),
        ("update throughput", "params_per_s"),
        ("host to device", "h2d_bytes_per_s"),
        ("device to host", "d2h_bytes_per_s"),
    ):
        values = [step[key] for step in steps]
        assert median(values) != values[-1], "one is not the other"
        assert len(values) == UPDATES - WARM_UPDATES
        shown = updates.pop(row)
        assert [value for value, _ in shown] == [median(values), values[-1]]
        assert all(text for _, text in shown)
    assert updates == {}

    compared = tables[f"Predicted against measured, median of {UPDATES - WARM_UPDATES} updates"]
    assert [[what, values[0][0], values[1][0]] for what, values in compared] == [
        [row["what"], row["predicted_s"], row["measured_s"]] for row in about["compared"]
    ]
    plan = about["plan"]
    assert [values[0][0] for _, values in tables["Plan"]] == [
        plan["placements"].count(its) for its in ("cpu", "streamed")
    ]
    assert sum(values[1][0] for _, values in tables["Plan"]) == sum(plan["numels"])
    locked, accelerator = tables["Memory that rank 0 has reserved for the update"]
    pinned_bytes = about["memory_bytes"]["pinned"]
    assert locked[0] == "page-locked host memory"
    assert locked[1] == [[pinned_bytes, "3.21 GB"], [pinned_bytes / WORKLOAD.numel, "14.4 bytes"]]
    assert accelerator[1][0] == [about["memory_bytes"]["accelerator"], "720 MB"]


def test_a_browser_would_see_it_if_something_were_wrong(tmp_path: Path) -> None:
    browser = find_browser()
    if browser is None:
        pytest.skip("no Chromium here: apt-get install chromium-headless-shell")
    path = tmp_path / "wrong.html"
    path.write_text(
        "<body style='width:600px'><img src='missing.png'><script>console.error('oh'); throw new Error('no')</script>"
    )
    with browsing(browser) as page:
        page.open(path, 390)
        assert page.evaluate("document.documentElement.scrollWidth") > 390
        assert page.evaluate("document.images[0].naturalWidth") == 0
    assert len(page.complaints) >= 3
    assert page.requests == [path.as_uri(), (tmp_path / "missing.png").as_uri()]


def test_everything_is_escaped_and_nothing_is_fetched(run: Path, tmp_path: Path) -> None:
    page = tmp_path / "elsewhere.html"
    assert main(["report", str(run), "--output", str(page)]) == 0
    text = page.read_text()
    assert html.escape(HOSTILE).replace("&quot;", "&#34;") in text
    assert "<script" not in text
    assert "http" not in text.replace(html.escape(HOSTILE).replace("&quot;", "&#34;"), "").replace(
        'http-equiv="Content-Security-Policy"', ""
    ).replace(html.escape(run.name).replace("&quot;", "&#34;"), "")


def test_a_run_reads_back(run: Path) -> None:
    found = Run.read(run)
    assert found.about == ABOUT
    assert len(found.steps) == UPDATES
    assert found.measured is not None
    timeline, phases = found.measured
    assert {span.action for span in timeline.spans} == set(PLAN.schedule.actions)
    assert found.steps[-1]["exposed_s"] == pytest.approx(seconds_of(Phase.EXPOSED, phases))
    assert found.steps[-1]["cpu_adam_s"] == pytest.approx(timeline.busy_s(Lane.CPU))


def test_a_run_that_goes_on_or_was_killed_is_read_as_far_as_it_is_written(tmp_path: Path) -> None:
    report = train(tmp_path, updates=EVERY + 1)
    with (tmp_path / "steps.jsonl").open("a") as steps:
        steps.write('{"step": 6, "upda')
    found = Run.read(tmp_path)
    assert [step["step"] for step in found.steps] == [1, 2, 3, 4, 5]
    assert found.compared_updates == EVERY - WARM_UPDATES
    assert main(["report", str(tmp_path)]) == 0
    report.close()
    # The next run takes its place.
    train(tmp_path, updates=1, predict=False).close()
    found = Run.read(tmp_path)
    assert (len(found.steps), found.compared, found.predicted) == (1, [], None)
    assert main(["report", str(tmp_path)]) == 0


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (None, ""),
        ("run.json", "[1, 2"),
        ("run.json", "[]"),
        ("run.json", '{"format": 99}'),
        ("steps.jsonl", "[1]}\n"),
        ("steps.jsonl", '{"step": "x"}\n'),
        ("timeline.json", '{"traceEvents": [{"ph": "X"}]}'),
        ("timeline.json", '{"traceEvents": [{"ph": "X", "ts": 0, "dur": 1, "name": "NAP 3", "args": {"slot": 1}}]}'),
        ("predicted.json", "{}"),
    ],
)
def test_what_is_no_run_is_refused_with_the_remedy(
    name: str | None, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if name is not None:
        train(tmp_path).close()
        (tmp_path / name).write_text(text)
    with pytest.raises(RunError):
        Run.read(tmp_path)
    assert main(["report", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert f"found {tmp_path}" in said
    assert '"report": "FOLDER"' in said


def test_a_page_that_cannot_be_written_is_said(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run), "--output", "/proc/nowhere/page.html"]) == 1
    assert "--output: must be a file that can be written, found /proc/nowhere/page.html" in capsys.readouterr().err


def test_a_folder_is_of_one_engine_at_a_time_and_a_new_run_replaces_what_is_there(tmp_path: Path) -> None:
    first = train(tmp_path)
    (tmp_path / "report.html").write_text("of another run")
    second = RunFolder(tmp_path, EVERY, ABOUT)
    nothing = UpdateRecord(
        1, Progress(1, 8), [], Work(numel=1, gpu_share=0, numels=[1], param_bytes=2), lambda: Timeline(())
    )
    with pytest.raises(FileExistsError, match="must be a folder of its own for each engine"):
        second.updated(nothing, first)
    first.close()
    assert len(Run.read(tmp_path).steps) == UPDATES
    third = train(tmp_path)
    assert not (tmp_path / "report.html").exists()
    third.close()
