"""What is reported of an update, where, and when; predicted against measured."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from itertools import count

import pytest

from deep_opt_states.report.comparison import Compared, Measured, Predicted, compare
from deep_opt_states.report.monitor_events import Event, MonitorEvents
from deep_opt_states.report.progress_line import ProgressLine
from deep_opt_states.report.record import Progress, UpdateRecord, Work
from deep_opt_states.report.reporter import WARM_UPDATES, Outlet, UpdateReport
from perf_model.prediction.overlap_windows import Windows
from perf_model.prediction.timeline import Phase, PhaseSpan, Span, Timeline
from perf_model.schedule.placement import place_by_stride
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Workload

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


WORK = Work(numel=40, gpu_share=0.5, numels=[10, 10, 8, 10], param_bytes=2)
"""A part of the third is updated at once."""


def reported(predicted: Timeline | None, updates: Sequence[float], outlets: Sequence[Outlet] = ()) -> list[str]:
    """Steps from 1, of 8 samples each."""
    said: list[str] = []
    predict = None if predicted is None else lambda _: Predicted(predicted, 0.0)
    steps = count(1)
    report = UpdateReport(WORK, predict, outlets, lambda: Progress(step := next(steps), 8 * step), said.append)
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


def test_a_forked_child_does_not_write_its_parents_report() -> None:
    class Closed:
        name = "a pipe"

        def updated(self, record: UpdateRecord, report: UpdateReport) -> None: ...

        def close(self, report: UpdateReport) -> None:
            os.write(write_end, b"closed")

    read_end, write_end = os.pipe()
    report = UpdateReport(WORK, None, [Closed()], lambda: Progress(1, 8), lambda _: None)
    if (child := os.fork()) == 0:
        report.close()
        os._exit(0)
    os.waitpid(child, 0)
    os.set_blocking(read_end, False)
    with pytest.raises(BlockingIOError):
        os.read(read_end, 6)
    report.close()
    assert os.read(read_end, 6) == b"closed"


def test_without_a_prediction_or_an_update_nothing_is_said() -> None:
    assert reported(None, [1.0] * 10) == []
    assert reported(timeline(1.0), [1.0] * WARM_UPDATES) == []


def test_rates_are_of_what_was_moved_while_the_lane_was_busy() -> None:
    record = UpdateRecord(1, Progress(1, 8), [PhaseSpan(Phase.EXPOSED, 0.0, 5.0)], WORK, lambda: timeline(2.0))
    its = record.numbers
    # Two prefetches of 12 bytes a parameter, and two publications of 2; 2 s each.
    assert its.h2d_bytes_per_s == (12 * (10 + 10) + 2 * (10 + 8)) / 8.0
    assert its.d2h_bytes_per_s == 12 * (10 + 10) / 4.0
    assert its.cpu_adam_s == 4.0
    assert (its.update_s, its.params_per_s) == (5.0, 40 / 5.0)
    assert its.hidden_s == 20.0 - 5.0


def test_no_rate_is_given_for_what_was_not_measured() -> None:
    record = UpdateRecord(1, Progress(1, 8), [PhaseSpan(Phase.EXPOSED, 0.0, 0.0)], WORK, lambda: timeline(0.0))
    its = record.numbers
    assert (its.h2d_bytes_per_s, its.d2h_bytes_per_s, its.params_per_s) == (None, None, None)


@pytest.mark.parametrize(("every", "steps"), [(2, [2, 4]), (math.inf, [])])
def test_a_line_when_deepspeed_prints(every: float, steps: list[int]) -> None:
    said: list[str] = []
    assert reported(None, [1.0, 2.0, 3.0, 4.0, 5.0], [ProgressLine(every, said.append)]) == []
    assert [line.split(",")[0] for line in said] == [f"step={step}" for step in steps]
    if steps:
        assert "exposed=4.00 s (median of 2: 3.50 s), hidden=16.0 s, 1e-05 M params/s" in said[1]


def test_the_monitor_gets_predictions_when_deepspeed_prints() -> None:
    events: list[Event] = []
    reported(timeline(1.0), [20.0] * 4, [MonitorEvents(2, events.extend)])
    at = {name: [samples for its, _, samples in events if its == name] for name, *_ in events}
    assert at["Train/Update/exposed_s"] == [8, 16, 24, 32]
    # The second step's update is the last that is not compared.
    assert at["Train/Update/predicted_update_s"] == [32]
    assert ("Train/Update/predicted_update_error", -0.5, 32) in events


def test_the_end_says_what_was_planned_where_something_was_updated() -> None:
    for updates, expected in (([], []), ([1.0], ["cpu: 4 sub-groups"])):
        said: list[str] = []
        progress = lambda: Progress(1, 8)  # noqa: E731
        report = UpdateReport(WORK, None, [], progress, said.append, planned="cpu: 4 sub-groups")
        for update_s in updates:
            report.updated([PhaseSpan(Phase.EXPOSED, 0.0, update_s)], lambda: timeline(2.0))
        report.close()
        report.close()
        assert said == expected


class Broken:
    name = "the broken one"

    def __init__(self) -> None:
        self.asked = 0

    def updated(self, record: UpdateRecord, report: UpdateReport) -> None:
        self.asked += 1
        raise OSError("no room")

    def close(self, report: UpdateReport) -> None:
        self.asked += 1


def test_an_outlet_that_fails_is_said_once_and_the_others_go_on() -> None:
    broken, lines = Broken(), list[str]()
    (said,) = reported(None, [1.0] * 3, [broken, ProgressLine(1, lines.append)])
    assert said.startswith("the broken one: the update cannot be reported there: OSError: no room.")
    assert broken.asked == 1
    assert len(lines) == 3
