"""Test the reports on updates: their content, time and place, and the comparison of prediction and measurement."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import count

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
from deep_opt_states.report.record import (
    ComparisonRow,
    MeasuredUpdate,
    PredictedUpdate,
    ReportedPlan,
    RunInfo,
    StepCounts,
    UpdateRecord,
    compare,
)
from deep_opt_states.report.verdict import verdict
from perf_model.prediction.overlap_windows import Windows
from perf_model.prediction.timeline import Phase, PhaseSpan, Span, Timeline
from perf_model.schedule.action import Lane
from perf_model.schedule.host_layout import Widths
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan, place_by_stride
from perf_model.schedule.workload import Workload

WORKLOAD = Workload.from_numels([10] * 4)
PLAN = UpdatePlan(workload=WORKLOAD, placements=place_by_stride(WORKLOAD, 2), num_slots=1)


def timeline(seconds: float) -> Timeline:
    """Return a timeline whose actions run one after another and take ``seconds`` each."""
    actions = PLAN.schedule.actions
    return Timeline(
        tuple(Span(action, position * seconds, (position + 1) * seconds) for position, action in enumerate(actions))
    )


@pytest.mark.promise("P5")
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


def test_less_than_a_millisecond_has_no_error() -> None:
    assert str(ComparisonRow("CPU_STEP", 12.4e-3, 53.2e-6)) == "CPU_STEP 53.2 us, predicted 12.4 ms"
    assert str(ComparisonRow("CPU_STEP", 53.2e-6, 12.4e-3)) == "CPU_STEP 12.4 ms, predicted 53.2 us"
    assert str(ComparisonRow("CPU_STEP", 1e-3, 2e-3)) == "CPU_STEP 2.00 ms, predicted 1.00 ms (-50%)"


def test_exposed_and_forward_are_compared_where_updates_overlap_with_forward() -> None:
    def phases(backward_s: float, exposed_s: float, forward_s: float) -> list[PhaseSpan]:
        return [
            PhaseSpan(Phase.BACKWARD, -backward_s, 0.0),
            PhaseSpan(Phase.EXPOSED, 0.0, 1.0),
            PhaseSpan(Phase.FORWARD, 1.0, 1.0 + forward_s),
            PhaseSpan(Phase.EXPOSED, 1.0 + forward_s, exposed_s + forward_s),
        ]

    measured = [
        MeasuredUpdate.from_timeline(timeline(2.0), phases(*lengths_s))
        for lengths_s in ((1, 5, 9), (2, 3, 6), (3, 4, 8))
    ]
    predicted = PredictedUpdate(
        timeline(1.0), 7.0, (PhaseSpan(Phase.EXPOSED, 0.0, 7.0), PhaseSpan(Phase.FORWARD, 7.0, 16.0))
    )
    rows = {row.name: row for row in compare(predicted, measured)}
    assert rows["update"] == ComparisonRow("update", 10.0, 20.0)
    assert rows["exposed"] == ComparisonRow("exposed", 7.0, 4)


PLANNED = ReportedPlan(numel=40, gpu_share=0.5, numels=[10, 10, 8, 10], widths=Widths(param=2, grad=2))
"""The work of four units."""


@pytest.fixture(autouse=True)
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list to which each line of the log is appended."""
    lines: list[str] = []
    for function in (log.info, log.warn, log.warn_this_rank):
        monkeypatch.setattr(log, function.__name__, lines.append)
    return lines


def report(predicted: Timeline | None, updates: Sequence[float], sinks: Sequence[ReportSink] = ()) -> None:
    """Report steps of 8 samples each, counted from 1, whose updates take the given seconds."""
    predict = None if predicted is None else lambda _: PredictedUpdate(predicted, 0.0)
    steps = count(1)
    reporter = UpdateReporter(
        replace(PLANNED, predict=predict, read_windows=Windows),
        sinks,
        lambda: StepCounts(step := next(steps), 8 * step),
    )
    for update_s in updates:
        reporter.updated([PhaseSpan(Phase.EXPOSED, 0.0, update_s)], lambda: timeline(2.0))
    reporter.close()
    reporter.close()


def test_the_summary_leaves_out_the_first_updates_and_is_logged_once(lines: list[str]) -> None:
    report(timeline(1.0), [1000.0] * WARM_UPDATES + [20.0, 40.0, 25.0])
    (text,) = lines
    first, update, kinds = text.splitlines()
    assert first == "5 updates, median of the last 3 against the prediction:"
    assert update == "  update 25.0 s, predicted 10.0 s (-60%)"
    assert kinds.startswith("  PREFETCH 4.00 s, predicted 2.00 s (-50%); GPU_STEP 4.00 s, ")
    assert kinds.count(";") == 4


def test_a_forked_child_does_not_write_its_parents_report() -> None:
    class Closed:
        name = "a pipe"

        def updated(self, record: UpdateRecord, reporter: UpdateReporter) -> None: ...

        def close(self, reporter: UpdateReporter) -> None:
            os.write(write_end, b"closed")

    read_end, write_end = os.pipe()
    reporter = UpdateReporter(PLANNED, [Closed()], lambda: StepCounts(1, 8))
    if (child := os.fork()) == 0:
        reporter.close()
        os._exit(0)
    os.waitpid(child, 0)
    try:
        os.set_blocking(read_end, False)
        with pytest.raises(BlockingIOError):
            os.read(read_end, 6)
        reporter.close()
        assert os.read(read_end, 6) == b"closed"
    finally:
        os.close(read_end)
        os.close(write_end)


@pytest.mark.parametrize(
    ("predicted", "updates", "logged"),
    [(None, 10, ["10 updates:"]), (1.0, 1, ["1 update:"]), (1.0, WARM_UPDATES, ["2 updates:"]), (1.0, 0, [])],
)
def test_nothing_is_compared_without_a_prediction_or_after_too_few_updates(
    predicted: float | None, updates: int, logged: list[str], lines: list[str]
) -> None:
    report(None if predicted is None else timeline(predicted), [1.0] * updates)
    assert lines == logged


def test_rates_divide_the_bytes_moved_by_the_time_that_the_lane_was_busy() -> None:
    record = UpdateRecord(StepCounts(1, 8), [PhaseSpan(Phase.EXPOSED, 0.0, 5.0)], PLANNED, lambda: timeline(2.0))
    numbers = record.numbers
    # Two PREFETCH actions of 12 bytes per parameter and two PUBLISH actions of 2 take 2 s each.
    assert numbers.h2d_bytes_per_s == (12 * (10 + 10) + 2 * (10 + 8)) / 8.0
    assert numbers.d2h_bytes_per_s == 12 * (10 + 10) / 4.0
    assert numbers.cpu_adam_s == 4.0
    assert (numbers.update_s, numbers.params_per_s) == (5.0, 40 / 5.0)
    assert numbers.hidden_s == 20.0 - 5.0


def test_rates_count_only_the_bytes_that_are_copied() -> None:
    in_host_memory = replace(PLANNED, widths=Widths(param=2, grad=2, publishes=False))
    record = UpdateRecord(StepCounts(1, 8), [], in_host_memory, lambda: timeline(2.0))
    assert record.numbers.h2d_bytes_per_s == 12 * (10 + 10) / 8.0
    assert record.numbers.d2h_bytes_per_s == 12 * (10 + 10) / 4.0


def test_there_is_no_rate_for_a_time_of_zero_seconds() -> None:
    record = UpdateRecord(StepCounts(1, 8), [PhaseSpan(Phase.EXPOSED, 0.0, 0.0)], PLANNED, lambda: timeline(0.0))
    numbers = record.numbers
    assert (numbers.h2d_bytes_per_s, numbers.d2h_bytes_per_s, numbers.params_per_s) == (None, None, None)


def test_a_line_is_logged_every_few_steps(lines: list[str]) -> None:
    report(None, [1.0, 2.0, 3.0, 4.0, 5.0], [ProgressLine(2)])
    assert [line.split(",")[0] for line in lines] == ["step=2", "step=4", "5 updates:"]
    assert "exposed=4.00 s (median of 2: 3.50 s), hidden=16.0 s, 1e-05 M params/s" in lines[1]


def test_the_monitor_receives_predictions_with_the_line_of_the_log() -> None:
    events: list[Event] = []
    report(timeline(1.0), [20.0] * 4, [MonitorEvents(2, events.extend)])
    samples_by_name = {name: [samples for other, _, samples in events if other == name] for name, *_ in events}
    assert samples_by_name["Train/Update/exposed_s"] == [8, 16, 24, 32]
    # The second step's update is the last that is not compared.
    assert samples_by_name["Train/Update/predicted_update_s"] == [32]
    assert ("Train/Update/predicted_update_error", -0.5, 32) in events


def test_the_summary_has_at_most_eight_lines(lines: list[str]) -> None:
    """Check a plan of all placements, with forwards beside updates."""
    description = ["cpu: 4 units", "streamed: 4 units", "resident: 4 units", "memory of rank 0: 1 kB"]
    slower = Windows(forward_s=1.0)
    plan = replace(
        PLANNED,
        description=description,
        predict=lambda _: PredictedUpdate(timeline(1.0), 0.5),
        read_windows=lambda: slower,
    )
    reporter = UpdateReporter(plan, [], lambda: StepCounts(1, 8))
    phases = [PhaseSpan(Phase.EXPOSED, 0.0, 1.0), PhaseSpan(Phase.FORWARD, 1.0, 3.0)]
    for _ in range(WARM_UPDATES + 1):
        reporter.updated(phases, lambda: timeline(2.0))
    reporter.close()
    _, update, _, forward, *rest = lines[0].splitlines()
    assert update.split("; ")[1] == "exposed 1.00 s, predicted 500 ms (-50%)"
    assert forward.startswith("  forward took 2.00 s alongside updates and 1.00 s without: +100% (")
    assert [line.strip() for line in rest] == description
    assert len(lines[0].splitlines()) == 8


def recorded(cost_s: float, stock_s: float | None, on_cpu: bool = False, accelerator: str = "cuda") -> RecordedRun:
    """Return a run of three iterations of 10 s, whose updates have the given cost."""
    plan = replace(PLAN, placements=(Placement.CPU,) * 4) if on_cpu else PLAN
    return RecordedRun(
        info=RunInfo(
            began="", world_size=1, accelerator=accelerator, software={}, plan=plan, memory_bytes={"pinned": 1}
        ),
        steps=[{"step": step, "cost_s": cost_s, "iteration_s": 10.0} for step in (1, 2, 3)],
        compared_updates=0,
        compared=[],
        forward_alone_s=None,
        stock_s=stock_s,
        drawn_step=1,
        measured=(timeline(1.0), ()),
        predicted=None,
    )


def test_the_verdict_states_the_cost_and_the_lane_that_limits_the_update() -> None:
    actions = PLAN.schedule.actions
    cpu = [Span(action, 0.0, 8.0) for action in actions if action.lane is Lane.CPU]
    others = [Span(action, 0.0, 2.0) for action in actions if action.lane is not Lane.CPU]
    run = replace(recorded(1.2, stock_s=None), measured=(Timeline((*cpu, *others)), ()))
    assert verdict(run) == (
        "The update costs 12% of an iteration: 1.20 s of 10.0 s. "
        "The CPU with its memory limits the update, busy for 100% of it."
    )
    # The actions of ``timeline`` run one after another.
    assert "Nothing is busy for more than 20% of the update" in verdict(recorded(1.2, stock_s=None))


def test_the_verdict_says_if_nothing_is_gained_and_if_all_is_as_with_stock() -> None:
    assert verdict(recorded(1.0, stock_s=3.0)).endswith("to cost at least 3.00 s: the plugin saves time.")
    no_gain = verdict(recorded(3.0, stock_s=3.0, on_cpu=True))
    assert "to cost at least 3.00 s: little or nothing is gained here. " in no_gain
    assert no_gain.endswith("The CPU updates every unit, as with stock.")
    assert verdict(replace(recorded(1.0, stock_s=None), steps=[])).startswith("No update was recorded.")


def test_the_verdict_begins_with_emulated_if_the_accelerator_is() -> None:
    assert verdict(recorded(1.0, stock_s=None, accelerator="cuda (EMULATED GPU)")).startswith("EMULATED: The update ")


class FailingSink:
    """A sink that fails at each update."""

    name = "the broken sink"

    def __init__(self) -> None:
        self.calls = 0

    def updated(self, record: UpdateRecord, reporter: UpdateReporter) -> None:
        self.calls += 1
        raise OSError("no space left")

    def close(self, reporter: UpdateReporter) -> None:
        self.calls += 1


def test_a_sink_that_fails_is_logged_once_and_disabled_while_the_others_continue(lines: list[str]) -> None:
    broken = FailingSink()
    report(None, [1.0] * 3, [broken, ProgressLine(1)])
    message, *of_others = lines
    assert message.startswith("the broken sink: the update cannot be reported there: OSError: no space left.")
    assert broken.calls == 1
    assert [line[:6] for line in of_others] == ["step=1", "step=2", "step=3", "3 upda"]


@pytest.mark.promise("P5")
@pytest.mark.parametrize(("measured_s", "is_slow"), [(1.9, False), (2.1, True)])
def test_updates_on_the_cpu_far_below_the_profile_are_logged_once(
    measured_s: float, is_slow: bool, lines: list[str]
) -> None:
    plan = replace(PLANNED, predict=lambda _: PredictedUpdate(timeline(1.0), 7.0), read_windows=Windows)
    reporter = UpdateReporter(plan, [SlowCpu()], lambda: StepCounts(step=0, samples=0))
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
        assert 'keep "bind_cores" enabled' in line
        assert "deep-opt-states profile" in line
        assert line.endswith("measure a new profile: deep-opt-states profile")


def test_a_few_slow_updates_on_the_cpu_are_not_logged(lines: list[str]) -> None:
    plan = replace(PLANNED, predict=lambda _: PredictedUpdate(timeline(1.0), 7.0), read_windows=Windows)
    reporter = UpdateReporter(plan, [SlowCpu()], lambda: StepCounts(step=0, samples=0))
    for number in range(4 * EVERY_UPDATES):
        measured = timeline(50.0 if number % 3 == 0 else 1.0)
        reporter.updated([PhaseSpan(Phase.EXPOSED, 0.0, 1.0)], partial(replace, measured))
    assert lines == []
    reporter.close()
