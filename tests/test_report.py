"""Predicted against measured: what is compared, and when it is said."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from deep_opt_states.config import ReportConfig
from deep_opt_states.report.comparison import Compared, Measured, Predicted, compare
from deep_opt_states.report.update_report import WARM_UPDATES, UpdateReport
from perf_model.placement import place_by_stride
from perf_model.plan import UpdatePlan
from perf_model.timeline import Phase, PhaseSpan, Span, Timeline
from perf_model.windows import Windows
from perf_model.workload import Workload

WORKLOAD = Workload.of([10] * 4)
PLAN = UpdatePlan(workload=WORKLOAD, placements=place_by_stride(WORKLOAD, 2), num_slots=1)


def timeline(seconds: float) -> Timeline:
    """Each action takes so long, one after another."""
    actions = PLAN.schedule.actions
    return Timeline(
        tuple(Span(action, position * seconds, (position + 1) * seconds) for position, action in enumerate(actions))
    )


def test_kinds_are_summed_and_medians_compared() -> None:
    measured = [
        Measured.of(timeline(seconds), [PhaseSpan(Phase.EXPOSED, 0.0, exposed_s)])
        for seconds, exposed_s in ((2.0, 20.0), (3.0, 10.0), (50.0, 40.0))
    ]
    rows = {row.what: row for row in compare(lambda _: Predicted(timeline(1.5), 7.0), measured)}
    assert set(rows) == {"update", "PREFETCH", "GPU_STEP", "FLUSH_STATES", "CPU_STEP", "PUBLISH"}
    assert rows["update"] == Compared("update", 10 * 1.5, 20.0)
    assert rows["update"].error == pytest.approx(-0.25)
    assert rows["PUBLISH"] == Compared("PUBLISH", 2 * 1.5, 2 * 3.0)
    assert str(rows["PUBLISH"]) == "PUBLISH       predicted   3.00 s, measured   6.00 s, error -50%"


def test_what_is_seen_of_an_update_is_predicted_for_the_windows_that_were_measured() -> None:
    asked: list[Windows] = []

    def predict(beside: Windows) -> Predicted:
        asked.append(beside)
        return Predicted(timeline(1.0), 7.0)

    def phases(backward_s: float, exposed_s: float, forward_s: float) -> list[PhaseSpan]:
        return [
            PhaseSpan(Phase.BACKWARD, -backward_s, 0.0),
            PhaseSpan(Phase.EXPOSED, 0.0, 1.0),
            PhaseSpan(Phase.FORWARD, 1.0, 1.0 + forward_s),
            PhaseSpan(Phase.EXPOSED, 1.0 + forward_s, exposed_s + forward_s),
        ]

    measured = [Measured.of(timeline(2.0), phases(*its)) for its in ((1, 5, 9), (2, 3, 6), (3, 4, 8))]
    rows = {row.what: row for row in compare(predict, measured)}
    assert asked == [Windows(backward_s=2, forward_s=8)]
    assert rows["update"] == Compared("update", 10.0, 20.0)
    assert rows["of it exposed"] == Compared("of it exposed", 7.0, 4)


def reported(predicted: Timeline | None, updates: Sequence[float], every_n_steps: int = 0) -> list[str]:
    said: list[str] = []
    predict = None if predicted is None else lambda _: Predicted(predicted, 0.0)
    report = UpdateReport(ReportConfig(every_n_steps=every_n_steps), PLAN, predict, True, said.append)
    for update_s in updates:
        report.updated([PhaseSpan(Phase.EXPOSED, 0.0, update_s)], lambda: timeline(2.0))
    report.close()
    report.close()
    return said


def test_the_first_updates_are_not_compared_and_it_is_said_once() -> None:
    (said,) = reported(timeline(1.0), [1000.0] * WARM_UPDATES + [20.0, 40.0, 25.0])
    first, update, *kinds = said.splitlines()
    assert first == "predicted against measured, median of 3 of 5 updates:"
    assert update.strip() == "update        predicted   10.0 s, measured   25.0 s, error -60%"
    assert len(kinds) == 5


def test_without_a_prediction_or_an_update_nothing_is_said() -> None:
    assert reported(None, [1.0] * 10) == []
    assert reported(timeline(1.0), [1.0] * WARM_UPDATES) == []


def test_a_line_every_n_steps() -> None:
    said = reported(None, [1.0, 2.0, 3.0, 4.0, 5.0], every_n_steps=2)
    assert [line.split(":")[0] for line in said] == ["update 2", "update 4"]
    assert "median 3500.0 ms exposed over the last 2; last one 16000.0 ms hidden" in said[1]
