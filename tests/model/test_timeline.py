from __future__ import annotations

import json
from pathlib import Path

from perf_model.action import Action, ActionKind, Lane
from perf_model.draw import draw
from perf_model.timeline import Span, Timeline

TIMELINE = Timeline(
    (
        Span(Action(ActionKind.PREFETCH, 1, 0), 0.0, 0.002),
        Span(Action(ActionKind.CPU_STEP, 0), 0.001, 0.004),
        Span(Action(ActionKind.PUBLISH, 0, None, ("CPU_STEP 0",)), 0.004, 0.005),
    )
)


def test_makespan_and_busy_time() -> None:
    assert TIMELINE.makespan_s == 0.005
    assert abs(TIMELINE.busy_s(Lane.H2D) - 0.003) < 1e-12
    assert TIMELINE.busy_s(Lane.D2H) == 0
    assert Timeline(()).makespan_s == 0


def test_chrome_trace_has_a_thread_a_lane_and_microseconds(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "trace.json"
    TIMELINE.write_chrome_trace(path)
    events = json.loads(path.read_text())["traceEvents"]
    threads = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert list(threads.values()) == [lane.value for lane in Lane]
    spans = {event["name"]: event for event in events if event["ph"] == "X"}
    assert threads[spans["CPU_STEP 0"]["tid"]] == "cpu"
    assert (spans["CPU_STEP 0"]["ts"], spans["CPU_STEP 0"]["dur"]) == (1000.0, 3000.0)
    assert spans["PUBLISH 0"]["args"] == {"slot": None, "after": ["CPU_STEP 0"]}


def test_picture_is_written(tmp_path: Path) -> None:
    path = tmp_path / "timeline.png"
    draw(TIMELINE, path, "a title")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 5000
