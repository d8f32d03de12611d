"""Test ``deep-opt-states report``: the recorded folder, and in a real browser, the numbers of the run on the page."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterator
from itertools import count, product
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import pytest

from deep_opt_states.cli.main import main
from deep_opt_states.report.folder import RecordedRun, RunError, RunWriter
from deep_opt_states.report.line import WARM_UPDATES, UpdateReporter
from deep_opt_states.report.record import PredictedUpdate, ReportedPlan, RunInfo, StepCounts, UpdateRecord
from perf_model.prediction.cost import CostModel
from perf_model.prediction.overlap_windows import Windows
from perf_model.prediction.simulate import simulate
from perf_model.prediction.timeline import IterationTimes, Phase, PhaseSpan, Span, Timeline, seconds_of
from perf_model.schedule.action import Lane
from perf_model.schedule.host_layout import Widths
from perf_model.schedule.plan import UpdatePlan, place_by_stride
from perf_model.schedule.workload import Workload
from tests.browser import Page, browsing, find_browser
from tests.model.profiles import profile

WORKLOAD = Workload.from_numels([30_000_000] * 7 + [12_345_678])
PLAN = UpdatePlan(workload=WORKLOAD, placements=place_by_stride(WORKLOAD, 2), num_slots=2)
HOSTILE = '<img src=http://example.invalid/x onerror=alert(1)> & "quoted" {{ 7 * 7 }} 💥'

MEMORY_BYTES = {"pinned": 3_210_000_000, "accelerator": 720_000_000}
ABOUT = {"began": "2026-01-02T03:04:05+00:00", "world_size": 4, "software": {"deepspeed": "0.19.8"}}
INFO = RunInfo(**ABOUT, accelerator=HOSTILE, plan=PLAN, memory_bytes=MEMORY_BYTES)

UPDATES, EVERY = 9, 4
FORWARD_ALONE_S = 0.03
NOTHING_PLANNED = ReportedPlan(numel=1, gpu_share=0, numels=[1], widths=Widths(param=2, grad=2))


def predicted(windows: Windows) -> PredictedUpdate:
    cost = CostModel.from_profile(profile())
    timeline = simulate(PLAN.schedule, WORKLOAD, cost, windows)
    exposed_s = windows.exposed_s(timeline, WORKLOAD, cost)
    return PredictedUpdate(timeline, exposed_s, windows.phases(timeline, WORKLOAD, cost))


def train(folder: Path, updates: int = UPDATES, predict: bool = True) -> UpdateReporter:
    """Write a run as training would, with updates of different lengths, and return the reporter."""
    steps, memory_bytes = count(1), count(2 * 10**9, 10**6)
    # No iteration follows the last update.
    iterations = iter([IterationTimes(0.2 + 0.01 * number, 0.5 + 0.03 * number) for number in range(updates - 1)])
    numels = [unit.numel for unit in WORKLOAD.units]
    reporter = UpdateReporter(
        ReportedPlan(
            numel=WORKLOAD.numel,
            gpu_share=0.5,
            numels=numels,
            widths=Widths(param=2, grad=2),
            predict=predicted if predict else None,
            read_windows=lambda: Windows(backward_s=0.02, forward_s=FORWARD_ALONE_S),
            read_iteration=lambda: next(iterations, None),
            read_memory_bytes=lambda: next(memory_bytes),
        ),
        [RunWriter(folder, EVERY, lambda: INFO)],
        lambda: StepCounts(step := next(steps), 8 * step),
    )
    for number in range(updates):
        windows = Windows(backward_s=0.02 + 0.001 * number, forward_s=0.03 + 0.002 * number)
        update, slower = predicted(windows), 1 + 0.05 * number
        timeline = Timeline(
            tuple(Span(span.action, slower * span.start_s, slower * span.end_s) for span in update.timeline.spans)
        )
        phases = [PhaseSpan(span.phase, slower * span.start_s, slower * span.end_s) for span in update.phases]
        reporter.updated(phases, lambda timeline=timeline: timeline)
    return reporter


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / HOSTILE.replace("/", "-")
    train(folder).close()
    return folder


TABLES = """[...document.querySelectorAll('table.facts')].map(table => [
    table.caption.innerText,
    [...table.tBodies[0].rows].map(row => [
        row.cells[0].innerText,
        [...row.querySelectorAll('data')].map(cell => [Number(cell.value), cell.innerText]),
    ]),
])"""

CHARTS = """[...document.querySelectorAll('.chart')].map(chart => [
    chart.ariaLabel,
    [...chart.querySelectorAll('.u-legend .u-label')].map(label => label.innerText),
    [...chart.querySelectorAll('canvas')].map(canvas => {
        const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
        return new Set(new Uint32Array(pixels.buffer)).size;
    })[0],
])"""
"""The text and the series of each chart, and the number of colours in it."""

BARS = "[...document.querySelectorAll('.timeline')].map(each => each.querySelectorAll('svg.lanes > svg').length)"

needs_browser = pytest.mark.skipif(
    find_browser() is None, reason="no Chromium here: apt-get install chromium-headless-shell"
)


@pytest.fixture
def page(run: Path) -> Iterator[Page]:
    assert main(["report", str(run)]) == 0
    browser = find_browser()
    assert browser is not None
    with browsing(browser) as page:
        yield page


@needs_browser
def test_a_browser_shows_the_numbers_of_the_run_in_light_and_dark_wide_and_narrow(run: Path, page: Page) -> None:
    info = json.loads((run / "run.json").read_text())
    steps = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()][WARM_UPDATES:]
    colours = {"light": ["rgb(27, 31, 36)", "rgb(255, 255, 255)"], "dark": ["rgb(228, 231, 235)", "rgb(20, 23, 27)"]}
    for width, scheme in product((1280, 390), colours):
        page.open(run / "report.html", width, scheme=scheme)
        assert page.evaluate("document.title") == page.evaluate("document.querySelector('h1').innerText")
        assert page.evaluate("document.title") == f"Updates of {run.name}"
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        style = "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
        assert page.evaluate(style) == colours[scheme]
        charts = page.evaluate(CHARTS)
        assert [series for _, series, _ in charts] == [
            ["step", "iteration", "forward", "backward"],
            ["step", "cost", "slower forward"],
            ["step", "memory"],
        ]
        assert all("per step" in text and colours > 10 for text, _, colours in charts)
        measured, predicted = page.evaluate(BARS)
        assert min(measured, predicted) >= len(PLAN.schedule.actions)
    tables: dict[str, Any] = dict(page.evaluate(TABLES))
    text = page.evaluate("document.body.innerText")
    # Frames that scroll can be reached by keyboard.
    frames = "[...document.querySelectorAll('.wide')].map(frame => [frame.tabIndex, frame.ariaLabel.length > 0])"
    assert set(map(tuple, page.evaluate(frames))) == {(0, True)}
    assert page.complaints == []
    assert page.requests == [(run / "report.html").as_uri()] * 4
    assert HOSTILE in text, "the hostile name is shown as text"
    check_tables(tables, info, steps)


@needs_browser
def test_a_button_enlarges_the_timeline_and_another_hands_the_trace_to_perfetto(run: Path, page: Page) -> None:
    page.open(run / "report.html", 1280)
    width = "document.querySelector('.timeline svg.lanes').getAttribute('width')"
    assert page.evaluate(width) == "100%"
    page.evaluate("document.querySelector('button[data-zoom=\"0.5\"]').click()")
    assert page.evaluate(width) == "200%"
    # A frame stands for the tab with Perfetto, which is not on this machine. It answers the first PING.
    trace = page.evaluate(
        """new Promise(resolve => {
        const tab = document.body.appendChild(document.createElement('iframe')).contentWindow;
        tab.postMessage = message => {
            if (message.perfetto) resolve(new TextDecoder().decode(message.perfetto.buffer));
            else window.dispatchEvent(new MessageEvent('message', {data: 'PONG', origin: ORIGIN, source: tab}));
        };
        window.open = () => tab;
        document.querySelector('button.perfetto').click();
    })""".replace("ORIGIN", "'https://ui.perfetto.dev'")
    )
    events = [json.loads(text)["traceEvents"] for text in (trace, (run / "timeline.json").read_text())]
    assert [event["name"] for event in events[0]] == [event["name"] for event in events[1]]
    assert page.complaints == []


def check_tables(tables: dict[str, Any], info: dict[str, Any], steps: list[dict[str, Any]]) -> None:
    updates = dict(tables["Updates"])
    rows = {"iteration": "iteration_s", "forward, without waits for the update": "forward_s", "CPU Adam": "cpu_adam_s"}
    rows |= {"backward, until the next update": "backward_s", "memory in use": "memory_bytes"}
    rows |= {"exposed: the model waits": "exposed_s", "hidden behind backward and forward": "hidden_s"}
    rows |= {"duration of the update": "update_s", "update throughput": "params_per_s"}
    rows |= {"host to device": "h2d_bytes_per_s", "device to host": "d2h_bytes_per_s"}
    for row, key in rows.items():
        values = [step[key] for step in steps if step[key] is not None]
        # No iteration follows the last update.
        of_last = [] if key in ("iteration_s", "forward_s", "backward_s") else [values[-1]]
        assert len(values) == UPDATES - WARM_UPDATES - (not of_last)
        assert [value for value, _ in updates.pop(row)] == [median(values), *of_last]
    slowed_s = [max(0.0, step["forward_s"] - FORWARD_ALONE_S) for step in steps[:-1]]
    assert updates.pop("forward takes longer during the update")[0][0] == pytest.approx(median(slowed_s))
    costs_s = [step["exposed_s"] + more_s for step, more_s in zip(steps[:-1], slowed_s, strict=True)]
    assert updates.pop("cost of the update")[0][0] == pytest.approx(median(costs_s))
    assert updates == {}
    compared = tables[f"Predicted against measured, median of {UPDATES - WARM_UPDATES} updates"]
    assert [[name, values[0][0], values[1][0]] for name, values in compared] == [
        [row["what"], row["predicted_s"], row["measured_s"]] for row in info["compared"]
    ]
    placements = info["plan"]["placements"]
    assert [values[0][0] for _, values in tables["Plan"]] == [placements.count(kind) for kind in ("cpu", "streamed")]
    locked, _ = tables["Memory that rank 0 reserved for the update"]
    pinned_bytes = info["memory_bytes"]["pinned"]
    assert locked[1] == [[pinned_bytes, "3.21 GB"], [pinned_bytes / WORKLOAD.numel, "14.4 bytes"]]


def test_text_is_escaped_and_nothing_is_fetched(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run), "--output", "/dev/null/page.html"]) == 1
    assert capsys.readouterr().err.startswith("--output: must be a file that can be written, found /dev/null/page.html")
    page = tmp_path / "elsewhere.html"
    assert main(["report", str(run), "--output", str(page)]) == 0
    text = page.read_text()
    hostile = html.escape(HOSTILE).replace("&quot;", "&#34;")
    assert hostile in text
    assert "<img" not in text
    assert not re.search(r"""\s(src|href)=["'](?!data:|#)""", text.replace(hostile, ""))
    assert "default-src 'none'" in text
    # Only the page's own scripts run.
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{each}'" for each in hashes)
    assert f'script-src {html.escape(allowed).replace("&#x27;", "&#39;")}">' in text
    assert len(hashes) == 2


def test_a_written_run_reads_back(run: Path) -> None:
    found = RecordedRun.read(run)
    assert found.info == INFO
    assert len(found.steps) == UPDATES
    assert found.measured is not None
    timeline, phases = found.measured
    assert {span.action for span in timeline.spans} == set(PLAN.schedule.actions)
    # The update whose duration is the median is drawn.
    drawn = found.steps[UPDATES // 2]
    assert drawn["step"] == found.drawn_step
    assert drawn["exposed_s"] == pytest.approx(seconds_of(Phase.EXPOSED, phases))
    assert drawn["cpu_adam_s"] == pytest.approx(timeline.busy_s(Lane.CPU))


def test_a_run_that_was_killed_or_still_trains_is_read_as_far_as_it_is_written(tmp_path: Path) -> None:
    reporter = train(tmp_path, updates=EVERY + 1)
    with (tmp_path / "steps.jsonl").open("a") as steps:
        steps.write('{"step": 6, "upda')
    found = RecordedRun.read(tmp_path)
    assert [step["step"] for step in found.steps] == [1, 2, 3, 4, 5]
    assert found.compared_updates == EVERY - WARM_UPDATES
    assert main(["report", str(tmp_path)]) == 0
    reporter.close()
    # The next run replaces the files.
    train(tmp_path, updates=1, predict=False).close()
    found = RecordedRun.read(tmp_path)
    assert (len(found.steps), found.compared, found.predicted) == (1, [], None)
    assert main(["report", str(tmp_path)]) == 0


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (None, ""),
        ("run.json", "[1, 2"),
        ("run.json", '{"format": 99}'),
        ("steps.jsonl", '{"step": "x"}\n'),
        ("timeline.json", '{"traceEvents": [{"ph": "X"}]}'),
        ("predicted.json", "{}"),
    ],
)
def test_a_folder_without_a_readable_run_is_refused_with_the_remedy(
    name: str | None, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if name is not None:
        train(tmp_path).close()
        (tmp_path / name).write_text(text)
    with pytest.raises(RunError):
        RecordedRun.read(tmp_path)
    assert main(["report", str(tmp_path)]) == 1
    message = capsys.readouterr().err
    assert f"found {tmp_path}" in message
    assert '"report": "FOLDER"' in message


def test_one_engine_at_a_time_writes_to_a_folder_and_a_new_run_replaces_the_files_there(tmp_path: Path) -> None:
    first = train(tmp_path)
    (tmp_path / "report.html").write_text("the page of another run")
    second = RunWriter(tmp_path, EVERY, lambda: INFO)
    nothing = UpdateRecord(StepCounts(1, 8), [], NOTHING_PLANNED, lambda: Timeline(()))
    with pytest.raises(FileExistsError, match="must be a folder of its own for each engine"):
        second.updated(nothing, first)
    first.close()
    assert len(RecordedRun.read(tmp_path).steps) == UPDATES
    third = train(tmp_path)
    assert not (tmp_path / "report.html").exists()
    third.close()
    # A writer that fails lets another one use the folder.
    failing = RunWriter(tmp_path, EVERY, lambda: INFO)
    with mock.patch.object(json, "dumps", side_effect=MemoryError), pytest.raises(MemoryError):
        failing.updated(nothing, first)
    train(tmp_path).close()
