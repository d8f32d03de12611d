"""Test ``deep-opt-states report``: the recorded folder, and in a real browser, the numbers of the run on the page."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import shutil
import subprocess
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import pytest

from deep_opt_states.cli.main import main
from deep_opt_states.report.folder import RecordedRun, RunError, RunWriter
from deep_opt_states.report.line import WARM_UPDATES, UpdateReporter
from deep_opt_states.report.record import PredictedUpdate, ReportedPlan, RunInfo, UpdateRecord
from perf_model.prediction.cost import CostModel
from perf_model.prediction.overlap_windows import Windows
from perf_model.prediction.simulate import simulate
from perf_model.prediction.timeline import IterationTimes, Phase, PhaseSpan, Span, Timeline, seconds_of
from perf_model.schedule.action import Lane
from perf_model.schedule.host_layout import Widths
from perf_model.schedule.plan import UpdatePlan, place_by_stride
from perf_model.schedule.workload import Workload
from tests.model.profiles import profile

WORKLOAD = Workload.from_numels([30_000_000] * 7 + [12_345_678])
PLAN = UpdatePlan(workload=WORKLOAD, placements=place_by_stride(WORKLOAD, 2), num_slots=2)
HOSTILE = '<img src=http://example.invalid/x onerror=alert(1)> & "quoted" {{ 7 * 7 }} 💥'
MEMORY_BYTES = {"pinned": 3_210_000_000, "accelerator": 720_000_000}
ABOUT = {"began": "2026-01-02T03:04:05+00:00", "world_size": 4, "software": {"deepspeed": "0.19.8"}}
INFO = RunInfo(**ABOUT, accelerator=HOSTILE, plan=PLAN, memory_bytes=MEMORY_BYTES)
UPDATES, EVERY = 9, 4
FORWARD_ALONE_S, BACKWARD_ALONE_S = 0.03, 0.02
PLANNED = ReportedPlan(plan=PLAN, widths=Widths(param=2, grad=2))


def predicted(windows: Windows) -> PredictedUpdate:
    cost = CostModel.from_profile(profile())
    timeline = simulate(PLAN.schedule, WORKLOAD, cost, windows)
    exposed_s = windows.added_time(timeline, WORKLOAD, cost).exposed_s
    return PredictedUpdate(timeline, exposed_s, windows.phases(timeline, WORKLOAD, cost))


def train(folder: Path, updates: int = UPDATES, predict: bool = True) -> UpdateReporter:
    steps, memory_bytes = count(1), count(2 * 10**9, 10**6)
    # No iteration follows the last update.
    iterations = iter([IterationTimes(0.2 + 0.01 * number, 0.5 + 0.03 * number) for number in range(updates - 1)])
    reporter = UpdateReporter(
        ReportedPlan(
            plan=PLAN,
            widths=Widths(param=2, grad=2),
            predict=predicted if predict else None,
            read_windows=lambda: Windows(backward_s=BACKWARD_ALONE_S, forward_s=FORWARD_ALONE_S),
            read_iteration=lambda: next(iterations, None),
            read_memory_bytes=lambda: next(memory_bytes),
        ),
        [RunWriter(folder, lambda: INFO)],
        lambda: (step := next(steps), 8 * step),
        EVERY,
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


BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)

PROBE = """
const complaints = [], note = event => complaints.push(`${event.type}: ${event.message ?? event.blockedURI ?? ''}`);
for (const type of ['error', 'unhandledrejection', 'securitypolicyviolation']) addEventListener(type, note, true);
console.error = console.warn = (...all) => complaints.push(all.join(' '));
addEventListener('load', async () => {
    const all = (selector, read, root = document) => [...root.querySelectorAll(selector)].map(read);
    const lanes = document.querySelector('.timeline svg.lanes');
    const found = {
        overflow: document.documentElement.scrollWidth - innerWidth,
        background: getComputedStyle(document.body).backgroundColor,
        text: document.body.innerText,
        tables: all('table.facts', table => [table.caption.innerText, [...table.tBodies[0].rows].map(row => [
            row.cells[0].innerText, all('data', cell => [Number(cell.value), cell.innerText], row)])]),
        charts: all('.chart', chart => all('.u-legend .u-label', label => label.innerText, chart)),
        colours: all('.chart canvas', canvas => {
            const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
            return new Set(new Uint32Array(pixels.buffer)).size;
        }),
        bars: all('.timeline', each => each.querySelectorAll('svg.lanes > svg').length),
        widths: [lanes.getAttribute('width')],
    };
    document.querySelector('button[data-zoom="0.5"]').click();
    found.widths.push(lanes.getAttribute('width'));
    // A frame stands for the tab with Perfetto, which is not on this machine. It answers the first PING.
    found.trace = await new Promise(resolve => {
        const tab = document.body.appendChild(document.createElement('iframe')).contentWindow;
        const origin = 'https://ui.perfetto.dev';
        tab.postMessage = message => {
            if (message.perfetto) resolve(new TextDecoder().decode(message.perfetto.buffer));
            else dispatchEvent(new MessageEvent('message', {data: 'PONG', origin, source: tab}));
        };
        window.open = () => tab;
        document.querySelector('button.perfetto').click();
    });
    const requests = performance.getEntriesByType('resource').map(request => request.name);
    document.documentElement.textContent = JSON.stringify({...found, complaints, requests});
});
"""
"""The first script of the page, which replaces it by what a reader sees, as JSON."""


def digest(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def seen(page: Path, *, is_light: bool = False) -> dict[str, Any]:
    assert BROWSER is not None
    text = page.read_text().replace("script-src ", f"script-src {digest(PROBE)} ", 1)
    probed = page.with_name("probed.html")
    probed.write_text(text.replace("<title>", f"<script>{PROBE}</script>\n<title>", 1))
    options = [f"--blink-settings=preferredColorScheme={is_light:d}", "--window-size=390,800", "--headless"]
    options += ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    options += [f"--user-data-dir={page.parent / 'browser'}", "--virtual-time-budget=5000", "--dump-dom"]
    shown = subprocess.check_output([BROWSER, *options, probed.as_uri()], text=True, timeout=60)
    found: dict[str, Any] = json.loads(html.unescape(re.sub(r"<[^>]*>", "", shown)))
    return found


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here: apt-get install chromium-headless-shell")
def test_a_browser_shows_the_numbers_of_the_run(run: Path) -> None:
    assert main(["report", str(run)]) == 0
    found = seen(run / "report.html")
    assert found["overflow"] <= 0
    assert found["background"] == "rgb(20, 23, 27)"
    assert seen(run / "report.html", is_light=True)["background"] == "rgb(255, 255, 255)"
    series = [
        ["step", "iteration", "forward", "backward"],
        ["step", "cost", "slower forward, backward"],
        ["step", "memory"],
    ]
    assert found["charts"] == series
    assert (len(found["colours"]), min(found["colours"]) > 10) == (len(series), True)
    assert min(found["bars"]) >= len(PLAN.schedule.actions)
    assert len(found["bars"]) == 2, "measured and predicted"
    assert found["widths"] == ["100%", "200%"]
    events = [json.loads(text)["traceEvents"] for text in (found["trace"], (run / "timeline.json").read_text())]
    assert [event["name"] for event in events[0]] == [event["name"] for event in events[1]]
    assert (found["complaints"], found["requests"]) == ([], [])
    assert HOSTILE in found["text"], "the hostile name is shown as text"
    check_tables(dict(found["tables"]), RecordedRun.read(run))


def check_tables(tables: dict[str, Any], recorded: RecordedRun) -> None:
    updates, steps = dict(tables["Updates"]), recorded.steps[WARM_UPDATES:]
    rows = {"iteration": "iteration_s", "exposed: the model waits": "exposed_s", "memory in use": "memory_bytes"}
    for row, key in rows.items():
        values = [step[key] for step in steps if step[key] is not None]
        # No iteration follows the last update.
        of_last = [] if key == "iteration_s" else [values[-1]]
        assert [value for value, _ in updates[row]] == [median(values), *of_last]
    slowed_s = [
        max(0.0, step["forward_s"] - FORWARD_ALONE_S) + max(0.0, step["last_backward_s"] - BACKWARD_ALONE_S)
        for step in steps[:-1]
    ]
    assert max(step["last_backward_s"] for step in steps) > BACKWARD_ALONE_S
    assert updates["forward and backward take longer"][0][0] == pytest.approx(median(slowed_s))
    costs_s = [step["exposed_s"] + more_s for step, more_s in zip(steps[:-1], slowed_s, strict=True)]
    assert updates["cost of the update"][0][0] == pytest.approx(median(costs_s))
    compared = tables[f"Predicted against measured, median of {UPDATES - WARM_UPDATES} updates"]
    assert [[name, values[0][0], values[1][0]] for name, values in compared] == [
        [row.name, row.predicted_s, row.measured_s] for row in recorded.compared
    ]
    assert [values[0][0] for _, values in tables["Plan"]] == [4, 4], "on the CPU, and streamed"
    locked, _ = tables["Memory that rank 0 reserved for the update"]
    pinned_bytes = MEMORY_BYTES["pinned"]
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
    allowed = " ".join(map(digest, scripts))
    assert f'script-src {html.escape(allowed).replace("&#x27;", "&#39;")}">' in text
    assert len(scripts) == 2


def test_a_written_run_reads_back_and_its_median_update_is_drawn(run: Path) -> None:
    found = RecordedRun.read(run)
    assert (found.info, len(found.steps)) == (INFO, UPDATES)
    assert found.measured is not None
    timeline, phases = found.measured
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
        ("steps.jsonl", '{"exposed_s": "x", "forward_s": null}\n'),
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
    assert ("not the trace of an update" in message) == (name in ("timeline.json", "predicted.json"))
    assert '"report": "FOLDER"' in message


def test_one_engine_at_a_time_writes_to_a_folder_and_a_new_run_replaces_the_files_there(tmp_path: Path) -> None:
    first = train(tmp_path)
    (tmp_path / "report.html").write_text("the page of another run")
    second = RunWriter(tmp_path, lambda: INFO)
    nothing = UpdateRecord(1, 8, False, [], PLANNED, lambda: Timeline(()))
    with pytest.raises(FileExistsError, match="must be a folder of its own for each engine"):
        second.updated(nothing, first)
    first.close()
    assert len(RecordedRun.read(tmp_path).steps) == UPDATES
    third = train(tmp_path)
    assert not (tmp_path / "report.html").exists()
    third.close()
    # A writer that fails lets another one use the folder.
    failing = RunWriter(tmp_path, lambda: INFO)
    with mock.patch.object(json, "dumps", side_effect=MemoryError), pytest.raises(MemoryError):
        failing.updated(nothing, first)
    train(tmp_path).close()
