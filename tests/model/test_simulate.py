"""Check the simulation by hand and against lanes, waits and capacities; slowdowns; the trace and the picture."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from matplotlib.figure import Figure

from perf_model.prediction.cost import CostModel, DiskRates, Resource
from perf_model.prediction.draw import draw
from perf_model.prediction.overlap_windows import Windows, slowest
from perf_model.prediction.simulate import simulate
from perf_model.prediction.slowdown import NO_SLOWDOWN, ModelProgress, Slowdown, SlowedForward, fit_slowdown
from perf_model.prediction.timeline import Phase, PhaseSpan, Span, Timeline
from perf_model.schedule.action import Action, ActionKind, Lane
from perf_model.schedule.host_layout import SIXTEEN_BIT
from perf_model.schedule.placement import Placement
from perf_model.schedule.schedule import Schedule
from perf_model.schedule.workload import Workload
from tests.model.costs import cost, costs, plan_of, windows
from tests.model.strategies import schedules

CPU, STREAMED, RESIDENT = Placement.CPU, Placement.STREAMED, Placement.RESIDENT
OVERLAPPED = (Phase.BACKWARD, Phase.EXPOSED, Phase.FORWARD, Phase.BACKWARD)

# Cases by hand. A unit has 10^9 parameters. On the CPU its update takes 1 s and its publish 1/6 s; streamed, its
# prefetch takes 1 s, its update 1 ms, and its flush 1 s.


@pytest.mark.parametrize(
    ("placements", "num_slots", "rates", "expected_s"),
    [
        ((CPU,) * 4, 1, {}, 4 + 1 / 6),
        ((STREAMED,) * 4, 1, {}, 4 * (1 + 1e-3 + 1)),
        # The third prefetch waits for the first flush. From then on, each direction takes one second per unit.
        ((STREAMED,) * 4, 2, {}, 1 + 4 + 2e-3),
        ((STREAMED,), 1, {"latency": 0.1}, 1 + 0.3 + 1e-3 + 1 + 0.3),
        ((RESIDENT,) * 4, 1, {"gpu": 1e9}, 4),
        # Residents wait for nothing, and units on the CPU are updated and published at the same time.
        ((RESIDENT,) * 4 + (CPU,) * 4, 1, {"gpu": 1e9}, 4 + 1 / 6),
    ],
)
def test_an_update_takes_the_seconds_that_are_counted_by_hand(
    placements: tuple[Placement, ...], num_slots: int, rates: dict[str, float], expected_s: float
) -> None:
    update_plan = plan_of(*placements, num_slots=num_slots)
    assert simulate(update_plan.schedule, update_plan.workload, cost(**rates)).end_s == pytest.approx(expected_s)


def test_forward_hides_updates_that_it_does_not_need_yet() -> None:
    # The units are published after 7/6 and 13/6 s. Forward needs the first immediately and the second when half of
    # forward is over.
    update_plan = plan_of(CPU, CPU)
    timeline = simulate(update_plan.schedule, update_plan.workload, cost())
    for forward_s, exposed_s in ((0.0, 13 / 6), (0.5, 13 / 6 - 0.25), (2.0, 7 / 6), (10.0, 7 / 6)):
        found_s = Windows(forward_s=forward_s).added_time(timeline, update_plan.workload, cost()).exposed_s
        assert found_s == pytest.approx(exposed_s), forward_s


@pytest.mark.parametrize(
    ("backward_s", "phases", "ends_s", "exposed_s"),
    [
        # The prefetch needs all of backward, so that nothing is left for the flush, which ends at 0.251 + 1 s.
        (0.75, (Phase.BACKWARD, Phase.EXPOSED, Phase.FORWARD, Phase.EXPOSED), (0, 0.251, 0.501, 1.251), 1.001),
        # Backward overlaps with half a second of the flush, and then prefetches.
        (1.5, (*OVERLAPPED, Phase.EXPOSED), (0, 0.001, 0.251, 0.751, 1.001), 0.251),
        # Backward overlaps with the flush until it has ended.
        (9.0, OVERLAPPED, (0, 0.001, 0.251, 1.001), 0.001),
    ],
)
def test_the_next_backward_hides_flushes_until_it_prefetches(
    backward_s: float, phases: tuple[Phase, ...], ends_s: tuple[float, ...], exposed_s: float
) -> None:
    update_plan = plan_of(STREAMED)
    overlap = Windows(backward_s=backward_s, forward_s=0.25)
    timeline = simulate(update_plan.schedule, update_plan.workload, cost(), overlap)
    found = overlap.phases(timeline, update_plan.workload, cost())
    assert tuple(span.phase for span in found) == phases
    assert tuple(span.end_s for span in found) == pytest.approx(ends_s)
    assert overlap.added_time(timeline, update_plan.workload, cost()).exposed_s == pytest.approx(exposed_s)
    # Nothing overlaps with the next forward, and so nothing with the backward after it.
    in_step = Windows(backward_s=backward_s)
    timeline = simulate(update_plan.schedule, update_plan.workload, cost(), in_step)
    assert in_step.added_time(timeline, update_plan.workload, cost()).exposed_s == timeline.end_s


def test_eager_units_are_updated_in_backward_as_soon_as_it_has_completed_them() -> None:
    # Backward completes a third of the parameters per second, the last unit first: units 2 and 1 at -2 and -1 s.
    eager = plan_of(CPU, CPU, CPU, eager=frozenset({1, 2}))
    overlap = Windows(backward_s=3.0, forward_s=3.0)
    assert overlap.completed_s(eager.workload) == pytest.approx({0: 0.0, 1: -1.0, 2: -2.0})

    def starts_s(model: CostModel, workload: Workload = eager.workload) -> dict[str, float]:
        spans = simulate(eager.schedule, workload, model, overlap).spans
        return {span.action.name: span.start_s for span in spans}

    quick = starts_s(cost(cpu=2e9))
    expected = {"CPU_STEP 0": 0.0, "SPECULATE 1": -1.0, "SPECULATE 2": -2.0, "COMMIT 1": 0.5, "COMMIT 2": 0.5}
    assert quick == pytest.approx(expected | {f"PUBLISH {unit}": 0.5 + unit / 6 for unit in range(3)})
    # With 1.5 s each, unit 1 starts when unit 2 is done, and delays unit 0 by 1 s.
    slow = starts_s(cost(cpu=1 / 1.5e-9))
    assert (slow["SPECULATE 2"], slow["SPECULATE 1"], slow["CPU_STEP 0"]) == pytest.approx((-2.0, -0.5, 1.0))
    # With 2.5 s, unit 1 has not started at second 0, and follows in the order of the schedule.
    slower = starts_s(cost(cpu=4e8))
    assert (slower["SPECULATE 2"], slower["CPU_STEP 0"], slower["SPECULATE 1"]) == pytest.approx((-2.0, 0.5, 3.0))
    # Forward uses unit 2 first, so that unit 0 would be complete first.
    reverse = starts_s(cost(cpu=2e9), replace(eager.workload, first_use=(2, 1, 0)))
    assert (reverse["SPECULATE 1"], reverse["SPECULATE 2"]) == pytest.approx((-1.0, 0.5))


def test_eager_units_pass_through_slots_in_backward_and_are_adopted_when_the_step_is_decided() -> None:
    # Backward completes a quarter of the parameters each second, the last unit first.
    eager = plan_of(STREAMED, STREAMED, STREAMED, STREAMED, num_slots=1, eager=frozenset({2, 3}))
    overlap = Windows(backward_s=4.0, forward_s=4.0)
    spans = simulate(eager.schedule, eager.workload, cost(h2d=48e9, d2h=48e9), overlap).spans
    times = {span.action.name: (span.start_s, span.end_s) for span in spans}
    assert times["PREFETCH 3"][0] == -4.0
    assert times["GPU_SPECULATE 3"][0] == pytest.approx(-3.0)
    assert times["PREFETCH 2"][0] == times["FLUSH_STATES 3"][1] < -2.5
    assert times["GPU_SPECULATE 2"][0] == pytest.approx(-2.0)
    assert times["PREFETCH 0"][0] == times["FLUSH_STATES 2"][1] < 0.0
    assert times["GPU_STEP 0"][0] == 0.0
    assert times["ADOPT 2"][0] >= times["PREFETCH 1"][1]
    assert times["ADOPT 3"][0] == times["ADOPT 2"][1]
    on_disk = replace(eager.workload.units[0], is_on_disk=True)
    workload = replace(eager.workload, units=(on_disk, *eager.workload.units[1:]))
    with_disk = replace(eager, workload=workload, placements=(CPU, STREAMED, STREAMED, STREAMED))
    model = cost().with_disk(DiskRates(6e9, 5e9, 7e9), SIXTEEN_BIT)
    spans = simulate(with_disk.schedule, workload, model, overlap).spans
    assert next(span.start_s for span in spans if span.action.kind is ActionKind.READ) < 0.0


def test_eager_units_hide_in_backward_and_slow_it_down() -> None:
    eager = plan_of(CPU, CPU, CPU, eager=frozenset({1, 2}))
    overlap = Windows(backward_s=3.0, forward_s=3.0, slowdown=Slowdown(cpu=0.25))
    timeline = simulate(eager.schedule, eager.workload, cost(cpu=2e9), overlap)
    # During two updates of half a second each, backward loses a quarter of each; forward waits for unit 0.
    assert overlap.added_time(timeline, eager.workload, cost()) == pytest.approx((0.5 + 1 / 6, 0.25))
    phases = overlap.phases(timeline, eager.workload, cost())
    assert (phases[0].start_s, phases[-1].end_s) == pytest.approx((-3.25, 3.0 + 0.5 + 1 / 6))
    in_step = replace(overlap, forward_s=0.0)
    assert in_step.added_time(timeline, eager.workload, cost()) == pytest.approx((0.5 + 3 / 6, 0.25))
    # Prefetches in the tail of backward, and a flush in the next one, slow it down also.
    streamed, slow_copies = plan_of(STREAMED), replace(overlap, forward_s=0.25, slowdown=Slowdown(copies=0.5))
    timeline = simulate(streamed.schedule, streamed.workload, cost(), slow_copies)
    assert slow_copies.added_time(timeline, streamed.workload, cost()) == pytest.approx((0.001, 0.5 + 0.25 + 0.25))


@given(schedules(may_be_eager=True, may_be_on_disk=True), costs, windows)
def test_a_simulation_respects_lanes_waits_windows_and_every_capacity(
    drawn: tuple[Schedule, Workload], model: CostModel, overlap: Windows
) -> None:
    schedule, workload = drawn
    model = model.with_disk(DiskRates(6e9, 5e9, 7e9), SIXTEEN_BIT)
    timeline = simulate(schedule, workload, model, overlap)
    assert tuple(span.action for span in timeline.spans) == schedule.actions
    ends = {span.action.name: span.end_s for span in timeline.spans}
    lane_ends = dict.fromkeys(Lane, -overlap.backward_s)
    completed_s = overlap.completed_s(workload)
    used = dict.fromkeys(Resource, 0.0)
    adopted = {action.unit for action in schedule.actions if action.kind is ActionKind.ADOPT}
    for span in timeline.spans:
        action, numel = span.action, workload.units[span.action.unit].numel
        load = model.load(action.kind, numel)
        assert span.start_s >= max((ends[name] for name in action.waits), default=-overlap.backward_s)
        if span.start_s < 0.0 and action.kind in (ActionKind.SPECULATE, ActionKind.GPU_SPECULATE):
            assert span.start_s >= completed_s[action.unit]
        elif span.start_s < 0.0:
            of_eager = action.kind is ActionKind.FLUSH_STATES and action.unit in adopted
            assert of_eager or action.kind in (ActionKind.PREFETCH, ActionKind.READ)
        if not (span.start_s < 0.0 and action.lane is Lane.CPU):
            assert span.start_s >= lane_ends[action.lane]
        assert span.end_s - span.start_s >= load.total_s * (1 - 1e-6) - 1e-12
        lane_ends[action.lane] = max(span.end_s, lane_ends[action.lane])
        for resource, amount in load.amounts.items():
            used[resource] += amount
    for resource, amount in used.items():
        assert amount <= model.capacities[resource] * timeline.active_s * (1 + 1e-6), resource


CPU_STEP, PUBLISH = Action(ActionKind.CPU_STEP, 0), Action(ActionKind.PUBLISH, 0, None, ("CPU_STEP 0",))
PREFETCHED = Span(Action(ActionKind.PREFETCH, 1, 0), 0.0, 0.002)
TIMELINE = Timeline((PREFETCHED, Span(CPU_STEP, 0.001, 0.004), Span(PUBLISH, 0.004, 0.005)))

PHASES = (
    PhaseSpan(Phase.BACKWARD, -0.1, 0.0),
    PhaseSpan(Phase.EXPOSED, 0.0, 0.002),
    PhaseSpan(Phase.FORWARD, 0.002, 0.2),
)


def test_a_chrome_trace_has_the_model_above_the_lanes_and_is_read_as_the_same_timeline(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "trace.json"
    TIMELINE.write_chrome_trace(path, PHASES)
    trace = json.loads(path.read_text())
    threads = {event["tid"]: event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"}
    assert [threads[tid] for tid in sorted(threads)] == ["model", *(lane.value for lane in TIMELINE.lanes)]
    exposed, *_ = (event for event in trace["traceEvents"] if event["name"] == "exposed update")
    assert (threads[exposed["tid"]], exposed["ts"], exposed["dur"]) == ("model", 0.0, 2000.0)
    timeline, phases = Timeline.from_chrome_trace(trace)
    for found, written in zip((*timeline.spans, *phases), (*TIMELINE.spans, *PHASES), strict=True):
        assert (found.start_s, found.end_s) == pytest.approx((written.start_s, written.end_s))
        assert getattr(found, "action", None) == getattr(written, "action", None)
        assert getattr(found, "phase", None) is getattr(written, "phase", None)


def test_a_picture_has_the_model_and_stocks_above_the_lanes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure.axes[0]))
    timeline = Timeline((Span(Action(ActionKind.PREFETCH, 3, 0), -0.005, 0.0), *TIMELINE.spans))
    for of_stock in ([], [PhaseSpan(Phase.EXPOSED, 0.0, 0.05)]):
        draw(timeline, tmp_path / "timeline.png", "a title", PHASES, of_stock)
    rows = ["model", "h2d", "compute", "d2h", "cpu", "publish"]
    for axes, expected, end_ms in zip(drawn, (rows, ["stock's model", *rows]), (6, 50), strict=True):
        assert [label.get_text().splitlines()[0] for label in axes.get_yticklabels()] == expected
        assert axes.get_xlim() == pytest.approx((-5.4, end_ms), rel=0.15)
        assert axes.get_title() == "update of 10.0 ms: 2.0 ms exposed, 8.0 ms hidden\na title"
    bars = {(round(bar.get_y() + 0.3), round(bar.get_x()), round(bar.get_width())) for bar in drawn[0].patches}
    assert {(1, -5, 5), (4, 1, 3)} < bars, "actions are on their lanes"


def spans(*times: tuple[ActionKind, float, float]) -> Timeline:
    return Timeline(tuple(Span(Action(kind, unit, None, ()), *ends) for unit, (kind, *ends) in enumerate(times)))


def test_forward_takes_longer_alongside_the_update_and_not_after_it() -> None:
    timeline = spans(
        (ActionKind.CPU_STEP, 0.0, 4.0), (ActionKind.PREFETCH, -1.0, 1.0), (ActionKind.FLUSH_STATES, 3.0, 6.0)
    )
    progress = ModelProgress(timeline, Slowdown(cpu=0.5, copies=0.25))
    # A quarter of the speed for 1 s, a half for 2 s, a quarter for 1 s, and three quarters for 2 s.
    for end_s, done_s in ((0.5, 0.125), (1.0, 0.25), (3.0, 1.25), (4.0, 1.5), (6.0, 3.0), (9.0, 6.0)):
        assert progress.end_s(0.0, done_s) == pytest.approx(end_s)
    assert progress.end_s(2.0, 0.75) == pytest.approx(4.0)
    assert ModelProgress(timeline, NO_SLOWDOWN).end_s(2.0, 0.75) == 2.75


@pytest.mark.parametrize(("cpu", "copies"), [(0.0, 0.0), (0.4, 0.1), (0.1, 0.6), (0.9, 0.9)])
def test_the_slowdown_is_found_from_forwards(cpu: float, copies: float) -> None:
    # As in training: first with the CPU alone, and then with both.
    beside = [(1.0, 0.0)] * 4 + [(0.5, 1.5), (1.5, 0.5), (1.0, 1.0), (0.7, 1.2)]
    found = fit_slowdown(
        [SlowedForward(cpu * cpu_s + copies * copies_s, cpu_s, copies_s) for cpu_s, copies_s in beside]
    )
    assert (found.cpu, found.copies) == pytest.approx((cpu, copies), abs=0.08)


@pytest.mark.parametrize("noise", [-0.003, 0.003])
@pytest.mark.parametrize(("cpu_s", "copies_s"), [(0.034, 0.2), (0.2, 0.2)])
def test_forwards_alongside_one_plan_have_a_slowdown_near_the_typical_one(
    cpu_s: float, copies_s: float, noise: float
) -> None:
    """Check noise that is larger for longer copies or for shorter ones, which would be taken for their slowdown."""
    forwards = []
    for number in range(-2, 3):
        longer = 1 + 0.02 * number
        forwards.append(SlowedForward(0.5 * cpu_s + noise * number, cpu_s, longer * copies_s))
    found = fit_slowdown(forwards)
    assert found.cpu == pytest.approx(0.45, abs=0.12)
    assert found.copies < 0.2


def test_a_measured_forward_counts_where_it_overlaps_with_the_update() -> None:
    timeline = spans((ActionKind.CPU_STEP, 0.0, 4.0), (ActionKind.PREFETCH, -1.0, 1.0), (ActionKind.PUBLISH, 4.0, 5.0))
    phases = [
        PhaseSpan(Phase.EXPOSED, 0.0, 0.5),
        PhaseSpan(Phase.FORWARD, 0.5, 3.0),
        PhaseSpan(Phase.EXPOSED, 3.0, 3.5),
        PhaseSpan(Phase.FORWARD, 3.5, 5.0),
    ]
    assert SlowedForward.measured(phases, timeline, alone_s=3.0) == SlowedForward(1.0, 3.0, 0.5)


def test_all_ranks_wait_for_the_slowest_one() -> None:
    one = Windows(backward_s=2.0, forward_s=1.0, slowdown=Slowdown(cpu=0.1, copies=0.4))
    other = Windows(backward_s=1.0, forward_s=3.0, slowdown=Slowdown(cpu=0.2, copies=0.3))
    assert slowest([one, other]) == Windows(backward_s=1.0, forward_s=1.0, slowdown=Slowdown(cpu=0.2, copies=0.4))
