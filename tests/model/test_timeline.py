"""Check the measures of a timeline, its Chrome trace and its picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from perf_model.prediction.draw import draw
from perf_model.prediction.timeline import Phase, PhaseSpan, Span, Timeline
from perf_model.schedule.action import Action, ActionKind, Lane
from tests.model.costs import makespan_s

TIMELINE = Timeline(
    (
        Span(Action(ActionKind.PREFETCH, 1, 0), 0.0, 0.002),
        Span(Action(ActionKind.CPU_STEP, 0), 0.001, 0.004),
        Span(Action(ActionKind.PUBLISH, 0, None, ("CPU_STEP 0",)), 0.004, 0.005),
    )
)


def test_makespan_and_busy_time_are_sums_of_spans() -> None:
    assert makespan_s(TIMELINE) == 0.005
    assert TIMELINE.busy_s(Lane.H2D) == 0.002
    assert abs(TIMELINE.busy_s(Lane.PUBLISH) - 0.001) < 1e-12
    assert TIMELINE.busy_s(Lane.D2H) == 0
    assert makespan_s(Timeline(())) == 0


PHASES = (
    PhaseSpan(Phase.BACKWARD, -0.1, 0.0),
    PhaseSpan(Phase.EXPOSED, 0.0, 0.002),
    PhaseSpan(Phase.FORWARD, 0.002, 0.2),
)


def test_chrome_trace_has_the_model_above_the_lanes_and_times_in_microseconds(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "trace.json"
    TIMELINE.write_chrome_trace(path, PHASES)
    events = json.loads(path.read_text())["traceEvents"]
    threads = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert [threads[tid] for tid in sorted(threads)] == ["model", *(lane.value for lane in TIMELINE.lanes)]
    spans = [event for event in events if event["ph"] == "X"]
    assert [(event["name"], threads[event["tid"]], event["ts"], event["dur"]) for event in spans[:4]] == [
        ("backward", "model", -100000.0, 100000.0),
        ("exposed update", "model", 0.0, 2000.0),
        ("forward", "model", 2000.0, 198000.0),
        ("PREFETCH 1", "h2d", 0.0, 2000.0),
    ]
    assert (spans[4]["name"], threads[spans[4]["tid"]], spans[4]["ts"]) == ("CPU_STEP 0", "cpu", 1000.0)
    assert (spans[5]["name"], spans[5]["args"]) == ("PUBLISH 0", {"slot": None, "after": ["CPU_STEP 0"]})


def test_chrome_trace_is_read_as_the_same_timeline() -> None:
    timeline, phases = Timeline.from_chrome_trace(json.loads(json.dumps(TIMELINE.chrome_trace(PHASES))))
    assert [span.action for span in timeline.spans] == [span.action for span in TIMELINE.spans]
    assert [span.phase for span in phases] == [span.phase for span in PHASES]
    for found, expected in ((timeline.spans, TIMELINE.spans), (phases, PHASES)):
        for span, other in zip(found, expected, strict=True):
            assert (span.start_s, span.end_s) == pytest.approx((other.start_s, other.end_s))


@pytest.mark.parametrize(
    "trace",
    [
        [],
        {"traceEvents": [{"ph": "X", "name": "sleep", "ts": 0, "dur": 1, "args": {}}]},
        {"traceEvents": [{"ph": "X", "name": "SLEEP 3", "ts": 0, "dur": 1, "args": {"slot": None, "after": []}}]},
    ],
)
def test_a_trace_that_is_not_of_an_update_is_refused(trace: object) -> None:
    with pytest.raises(ValueError, match=r"trace|Phase|action"):
        Timeline.from_chrome_trace(trace)


def test_picture_is_written_as_png(tmp_path: Path) -> None:
    path = tmp_path / "timeline.png"
    draw(TIMELINE, path, "a title")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 5000


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Return the figures that are written."""
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    return figures


def test_picture_shows_actions_that_ran_before_the_step_was_decided(drawn: list[Figure], tmp_path: Path) -> None:
    early = Span(Action(ActionKind.PREFETCH, 3, 0), -0.020, -0.015)
    draw(Timeline((early, *TIMELINE.spans)), tmp_path / "timeline.png", "word " * 100)
    (axes,) = drawn[0].axes
    left_ms, right_ms = axes.get_xlim()
    assert left_ms == -20
    assert 5 < right_ms < 6
    update, *title = axes.get_title().splitlines()
    assert update == "update of 10.0 ms", "idle time is not part of the update"
    assert len(title) > 1, "wrapped"
    busy = [label.get_text() for label in axes.get_yticklabels()]
    assert busy == ["h2d\n70% busy", "compute\n0% busy", "d2h\n0% busy", "cpu\n30% busy", "publish\n10% busy"]


def test_picture_has_stocks_model_above_the_plugins_on_one_axis(drawn: list[Figure], tmp_path: Path) -> None:
    end_s = 10 * TIMELINE.end_s
    of_stock = [PhaseSpan(Phase.EXPOSED, 0.0, end_s)]
    draw(TIMELINE, tmp_path / "timeline.png", "a title", PHASES, of_stock)
    (axes,) = drawn[0].axes
    assert [label.get_text() for label in axes.get_yticklabels()][:2] == ["stock's model", "model"]
    assert axes.get_xlim()[1] == pytest.approx(end_s * 1e3)
    in_first_row = [bar for bar in axes.patches if bar.get_y() + bar.get_height() / 2 == 0]
    assert [bar.get_width() for bar in in_first_row] == [pytest.approx(end_s * 1e3)]


def test_picture_has_the_model_above_the_lanes(drawn: list[Figure], tmp_path: Path) -> None:
    """Check also that little of backward and forward is shown: as much as shows which actions they hide."""
    early = Span(Action(ActionKind.PREFETCH, 3, 0), -0.005, 0.0)
    draw(Timeline((early, *TIMELINE.spans)), tmp_path / "timeline.png", "a title", PHASES)
    (axes,) = drawn[0].axes
    left_ms, right_ms = axes.get_xlim()
    assert -6 < left_ms < -5
    assert 5 < right_ms < 6
    assert axes.get_title().splitlines()[0] == "update of 10.0 ms: 2.0 ms exposed, 8.0 ms hidden"
    rows = [label.get_text().splitlines()[0] for label in axes.get_yticklabels()]
    assert rows == ["model", "h2d", "compute", "d2h", "cpu", "publish"]
    bars = {(round(bar.get_y() + 0.3), round(bar.get_x()), round(bar.get_width())) for bar in axes.patches}
    assert {(1, -5, 5), (4, 1, 3)} < bars, "actions are on their lanes"
    shown = [label.get_text() for label in axes.texts]
    assert "forward 198 ms" in shown, "the label gives the whole phase, of which a part is shown"
    (legend,) = drawn[0].legends
    assert [text.get_text() for text in legend.texts][:3] == ["backward", "forward", "exposed update"]
