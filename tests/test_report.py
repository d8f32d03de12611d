"""Test the reports on updates: their content and time, and the comparison of prediction and measurement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from unittest import mock

import pytest

from deep_opt_states import log
from deep_opt_states.report.folder import RecordedRun
from deep_opt_states.report.line import (
    EVERY_UPDATES,
    WARM_UPDATES,
    Event,
    MonitorEvents,
    ProgressLine,
    ReportSink,
    SlowCpu,
    UpdateReporter,
)
from deep_opt_states.report.page import verdict
from deep_opt_states.report.record import (
    ComparisonRow,
    MeasuredUpdate,
    PredictedUpdate,
    ReportedPlan,
    RunInfo,
    UpdateRecord,
    compare,
)
from perf_model.prediction.overlap_windows import Windows
from perf_model.prediction.timeline import Phase, PhaseSpan, Span, Timeline
from perf_model.schedule.action import Lane
from perf_model.schedule.host_layout import Widths
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan, place_by_stride
from perf_model.schedule.workload import Workload
from tests.forked_child import exit_code_of_child

WORKLOAD = Workload.from_numels([10, 10, 12, 8])
PLAN = UpdatePlan(workload=WORKLOAD, placements=place_by_stride(WORKLOAD, 2), num_slots=1)


def timeline(seconds: float) -> Timeline:
    spans = [Span(each, place * seconds, (place + 1) * seconds) for place, each in enumerate(PLAN.schedule.actions)]
    return Timeline(tuple(spans))


@pytest.mark.P5
def test_actions_are_summed_by_kind_and_medians_are_compared() -> None:
    measured = [
        MeasuredUpdate.from_timeline(timeline(seconds), [PhaseSpan(Phase.EXPOSED, 0.0, exposed_s)])
        for seconds, exposed_s in ((2.0, 20.0), (3.0, 10.0), (50.0, 40.0))
    ]
    rows = {row.name: row for row in compare(PredictedUpdate(timeline(1.5), 7.0), measured)}
    assert set(rows) == {"update", "PREFETCH", "GPU_STEP", "FLUSH_STATES", "CPU_STEP", "PUBLISH"}
    assert rows["update"] == ComparisonRow("update", 10 * 1.5, 20.0)
    assert rows["update"].error == pytest.approx(-0.25)
    assert rows["PUBLISH"] == ComparisonRow("PUBLISH", 2 * 1.5, 2 * 3.0)
    assert str(rows["PUBLISH"]) == "PUBLISH 6.00 s, predicted 3.00 s (-50%)"


PLANNED = ReportedPlan(plan=PLAN, widths=Widths(param=2, grad=2))


@pytest.fixture(autouse=True)
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    for function in (log.info, log.warn, log.warn_this_rank):
        monkeypatch.setattr(log, function.__name__, lines.append)
    return lines


def report(
    predicted: Timeline | None, updates: Sequence[float], sinks: Sequence[ReportSink] = (), every_n_steps: int = 1
) -> None:
    predict = None if predicted is None else lambda _: PredictedUpdate(predicted, 0.0)
    steps = count(1)
    reporter = UpdateReporter(
        replace(PLANNED, predict=predict, read_windows=Windows),
        sinks,
        lambda: (step := next(steps), 8 * step),
        every_n_steps,
    )
    for update_s in updates:
        reporter.updated([PhaseSpan(Phase.EXPOSED, 0.0, update_s)], lambda: timeline(2.0))
    reporter.close()
    reporter.close()


def test_a_forked_child_does_not_write_its_parents_report() -> None:
    sink = mock.Mock()
    reporter = UpdateReporter(PLANNED, [sink], lambda: (1, 8), 1)

    def close() -> int:
        reporter.close()
        return int(sink.close.call_count)

    assert exit_code_of_child(close) == 0
    assert close() == 1


def test_rates_divide_the_bytes_moved_by_the_time_that_the_lane_was_busy() -> None:
    record = UpdateRecord(1, 8, False, [PhaseSpan(Phase.EXPOSED, 0.0, 5.0)], PLANNED, lambda: timeline(2.0))
    numbers = record.numbers
    # Two PREFETCH actions of 12 bytes per parameter and two PUBLISH actions of 2 take 2 s each.
    assert numbers["h2d_bytes_per_s"] == (12 * (10 + 8) + 2 * (10 + 12)) / 8.0
    assert numbers["d2h_bytes_per_s"] == 12 * (10 + 8) / 4.0
    assert numbers["cpu_adam_s"] == 4.0
    assert (numbers["update_s"], numbers["params_per_s"]) == (5.0, 40 / 5.0)
    assert numbers["hidden_s"] == 20.0 - 5.0


def test_a_line_is_logged_every_few_steps_and_the_monitor_receives_predictions_with_it(lines: list[str]) -> None:
    report(None, [1.0, 2.0, 3.0, 4.0, 5.0], [ProgressLine()], 2)
    assert [line.split(",")[0] for line in lines] == ["step=2", "step=4", "5 updates:"]
    assert "exposed=4.00 s (median of 2: 3.50 s), hidden=16.0 s, 1e-05 M params/s" in lines[1]
    events: list[Event] = []
    report(timeline(1.0), [20.0] * 4, [MonitorEvents(events.extend)], 2)
    samples_by_name = {name: [samples for other, _, samples in events if other == name] for name, *_ in events}
    assert samples_by_name["Train/Update/exposed_s"] == [8, 16, 24, 32]
    # The second step's update is the last that is not compared.
    assert samples_by_name["Train/Update/predicted_update_s"] == [32]
    assert ("Train/Update/predicted_update_error", -0.5, 32) in events


def test_the_summary_leaves_out_the_first_updates_and_is_logged_once(lines: list[str]) -> None:
    report(timeline(1.0), [1000.0] * WARM_UPDATES + [20.0, 40.0, 25.0])
    first, update, kinds = lines.pop().splitlines()
    assert first == "5 updates, median of the last 3 against the prediction:"
    assert update == "  update 25.0 s, predicted 10.0 s (-60%)"
    assert kinds.startswith("  PREFETCH 4.00 s, predicted 2.00 s (-50%); GPU_STEP 4.00 s, ")
    assert (kinds.count(";"), lines) == (4, [])
    # A plan of all placements, with forwards during updates.
    predicted, description = PredictedUpdate(timeline(1.0), 0.5), ["cpu: 4 units", "memory of rank 0: 1 kB"]
    plan = replace(
        PLANNED, description=description, predict=lambda _: predicted, read_windows=lambda: Windows(forward_s=1.0)
    )
    reporter = UpdateReporter(plan, [], lambda: (1, 8), 1)
    phases = [PhaseSpan(Phase.EXPOSED, 0.0, 1.0), PhaseSpan(Phase.FORWARD, 1.0, 3.0)]
    for _ in range(WARM_UPDATES + 1):
        reporter.updated(phases, lambda: timeline(2.0))
    reporter.close()
    _, update, _, forward, *rest = lines[0].splitlines()
    assert update.split("; ")[1] == "exposed 1.00 s, predicted 500 ms (-50%)"
    assert forward.startswith("  forward took 2.00 s alongside updates and 1.00 s without: +100% (")
    assert [line.strip() for line in rest] == description


def recorded(cost_s: float, stock_s: float | None, on_cpu: bool = False, accelerator: str = "cuda") -> RecordedRun:
    plan = replace(PLAN, placements=(Placement.CPU,) * 4) if on_cpu else PLAN
    memory_bytes = {"pinned": 1}
    return RecordedRun(
        info=RunInfo(
            began="", world_size=1, accelerator=accelerator, software={}, plan=plan, memory_bytes=memory_bytes
        ),
        steps=[{"step": step, "cost_s": cost_s, "iteration_s": 10.0} for step in (1, 2, 3)],
        compared_updates=0,
        compared=[],
        forward_alone_s=None,
        backward_alone_s=None,
        stock_s=stock_s,
        drawn_step=1,
        measured=(timeline(1.0), ()),
        predicted=None,
    )


def test_the_verdict_states_the_cost_what_limits_the_update_and_what_is_gained() -> None:
    actions = PLAN.schedule.actions
    spans = [Span(action, 0.0, 8.0 if action.lane is Lane.CPU else 2.0) for action in actions]
    run = replace(recorded(1.2, stock_s=None, accelerator="cuda (EMULATED GPU)"), measured=(Timeline(tuple(spans)), ()))
    assert verdict(run) == (
        "EMULATED: The update costs 12% of an iteration: 1.20 s of 10.0 s. "
        "The CPU with its memory limits the update, busy for 100% of it."
    )
    # The actions of ``timeline`` run one after another.
    assert "Nothing is busy for more than 20% of the update" in verdict(recorded(1.2, stock_s=None))
    assert verdict(recorded(1.0, stock_s=3.0)).endswith("to cost at least 3.00 s: the plugin saves time.")
    no_gain = verdict(recorded(3.0, stock_s=3.0, on_cpu=True))
    assert "to cost at least 3.00 s: little or nothing is gained here. " in no_gain
    assert no_gain.endswith("The CPU updates every unit, as with stock.")
    assert verdict(replace(recorded(1.0, stock_s=None), steps=[])).startswith("No update was recorded.")


def test_a_sink_that_fails_is_logged_once_and_disabled_while_the_others_continue(lines: list[str]) -> None:
    broken = mock.Mock()
    broken.name = "the broken sink"
    broken.updated.side_effect = OSError("no space left")
    report(None, [1.0] * 3, [broken, ProgressLine()])
    message, *of_others = lines
    assert message.startswith("the broken sink: the update cannot be reported there: OSError: no space left.")
    assert (broken.updated.call_count, broken.close.call_count) == (1, 0)
    assert [line[:6] for line in of_others] == ["step=1", "step=2", "step=3", "3 upda"]


@pytest.mark.P5
@pytest.mark.parametrize(("measured_s", "is_slow"), [(1.9, False), (2.1, True)])
def test_cpu_updates_far_below_the_profile_are_logged_once(measured_s: float, is_slow: bool, lines: list[str]) -> None:
    plan = replace(PLANNED, predict=lambda _: PredictedUpdate(timeline(1.0), 7.0), read_windows=Windows)
    reporter = UpdateReporter(plan, [SlowCpu()], lambda: (0, 0), 1)
    exposed = [PhaseSpan(Phase.EXPOSED, 0.0, 1.0)]
    for _ in range(EVERY_UPDATES - 1):
        reporter.updated(exposed, lambda: timeline(measured_s))
    assert lines == []
    for _ in range(4 * EVERY_UPDATES):
        reporter.updated(exposed, lambda: timeline(measured_s))
    assert len(lines) == is_slow
    reporter.close()
    if is_slow:
        line, _ = lines
        assert line.startswith("CPU updates run at 0.48 of the profile")
        assert line.endswith("measure a new profile: deep-opt-states profile")
