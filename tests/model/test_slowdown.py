"""Check how a forward beside an update is slowed down, and that the slowdown is found in measured forwards."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perf_model.planner import UNIT_SIZES, evaluate, plan_units
from perf_model.prediction.memory import DEFAULT_SETUP, Budgets
from perf_model.prediction.overlap_windows import Windows, slowest
from perf_model.prediction.slowdown import NO_SLOWDOWN, ModelProgress, Slowdown, SlowedForward, fit_slowdown
from perf_model.prediction.timeline import Phase, PhaseSpan, Span, Timeline, seconds_of
from perf_model.schedule.action import Action, ActionKind
from perf_model.schedule.cutting import cut_into_units
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan, place_all
from perf_model.schedule.workload import Partition, Workload
from tests.model.costs import cost

shares = st.floats(0.0, 0.9)
seconds = st.floats(0.01, 10.0)


def spans(*times: tuple[ActionKind, float, float]) -> Timeline:
    return Timeline(tuple(Span(Action(kind, unit, None, ()), *ends) for unit, (kind, *ends) in enumerate(times)))


def test_forward_takes_longer_beside_the_update_and_not_after_it() -> None:
    timeline = spans(
        (ActionKind.CPU_STEP, 0.0, 4.0), (ActionKind.PREFETCH, -1.0, 1.0), (ActionKind.FLUSH_STATES, 3.0, 6.0)
    )
    progress = ModelProgress(timeline, Slowdown(cpu=0.5, copies=0.25))
    # A quarter of the speed for 1 s, a half for 2 s, a quarter for 1 s, and three quarters for 2 s.
    for end_s, done_s in ((0.5, 0.125), (1.0, 0.25), (3.0, 1.25), (4.0, 1.5), (6.0, 3.0), (9.0, 6.0)):
        assert progress.end_s(0.0, done_s) == pytest.approx(end_s)
    assert progress.end_s(2.0, 0.75) == pytest.approx(4.0)
    assert ModelProgress(timeline, NO_SLOWDOWN).end_s(2.0, 0.75) == 2.75


def test_the_time_that_forward_loses_is_no_exposed_time() -> None:
    workload = Workload.from_numels([10**8] * 10)
    plan = UpdatePlan(workload=workload, placements=place_all(workload, Placement.CPU), num_slots=1)
    alone = Windows(backward_s=1.0, forward_s=0.5)
    slowed = replace(alone, slowdown=Slowdown(cpu=0.5))
    before, after = (evaluate(plan, cost(), windows, DEFAULT_SETUP) for windows in (alone, slowed))
    assert before.added.slowed_s == pytest.approx(0.0)
    assert after.added.slowed_s > 0.0
    assert after.added.exposed_s < before.added.exposed_s
    assert after.added.total_s >= before.added.total_s
    phases = slowed.phases(after.timeline, workload, cost())
    assert seconds_of(Phase.FORWARD, phases) == pytest.approx(alone.forward_s + after.added.slowed_s)
    assert seconds_of(Phase.EXPOSED, phases) == pytest.approx(after.added.exposed_s)


def test_the_planner_keeps_the_cpu_quiet_where_that_slows_down_forward() -> None:
    model = cost(cpu=1.5e9, h2d=25e9, d2h=26e9, both=42e9, dram=90e9, gpu=8e10, latency=1e-5)
    partitions = [[Partition(f"layers.{layer}.weight", 10**8) for layer in range(20)]]
    alone = Windows(backward_s=2.0, forward_s=1.5)
    on_cpu, added_s = [], []
    for windows in (alone, replace(alone, slowdown=Slowdown(cpu=0.6))):
        _, found = plan_units(
            lambda size: cut_into_units(partitions, size, lambda name: None),
            UNIT_SIZES,
            model,
            Budgets(gpu_bytes=8 * 10**9),
            windows,
            DEFAULT_SETUP,
        )
        on_cpu.append(found.plan.numel(Placement.CPU))
        added_s.append(
            evaluate(found.plan, model, replace(alone, slowdown=Slowdown(cpu=0.6)), DEFAULT_SETUP).added.total_s
        )
    assert on_cpu[1] < on_cpu[0]
    assert added_s[1] < added_s[0]


@given(shares, shares, st.lists(st.tuples(seconds, seconds), min_size=2, max_size=6))
def test_the_slowdown_is_found_in_forwards_beside_different_work(
    cpu: float, copies: float, beside: list[tuple[float, float]]
) -> None:
    # As in training: first beside the CPU alone, and then beside both.
    forwards = [SlowedForward(cpu * 1.0, 1.0, 0.0)]
    forwards += [SlowedForward(cpu * cpu_s + copies * copies_s, cpu_s, copies_s) for cpu_s, copies_s in beside]
    found = fit_slowdown(forwards)
    assert found.cpu == pytest.approx(cpu, abs=0.02)
    assert found.copies == pytest.approx(copies, abs=0.02)


@pytest.mark.parametrize(
    ("forwards", "expected"),
    [
        ([], NO_SLOWDOWN),
        ([SlowedForward(-0.2, 1.0, 0.5)], NO_SLOWDOWN),
        ([SlowedForward(0.3, 0.0, 0.0)], NO_SLOWDOWN),
        ([SlowedForward(0.2, 1.0, 0.0), SlowedForward(0.4, 1.0, 0.0)], Slowdown(cpu=0.3)),
        ([SlowedForward(0.2, 0.0, 0.4)], Slowdown(copies=0.5)),
        ([SlowedForward(0.2, 0.4, 0.4)] * 3, Slowdown(cpu=0.5)),
        ([SlowedForward(0.21, 0.4, 0.41)] * 3, Slowdown(cpu=0.525)),
        ([SlowedForward(9.0, 1.0, 0.0)], Slowdown(cpu=1.0)),
    ],
    ids=["nothing", "faster", "beside nothing", "CPU alone", "copies alone", "both alike", "nearly alike", "all speed"],
)
def test_shares_of_work_that_no_forward_ran_beside_are_zero(forwards: list[SlowedForward], expected: Slowdown) -> None:
    found = fit_slowdown(forwards)
    assert (found.cpu, found.copies) == pytest.approx((expected.cpu, expected.copies))


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
