"""Check the events after which another plan is adopted, and the lines that explain it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from perf_model.plan_request import PlanRequest
from perf_model.prediction.cost import Resource
from perf_model.prediction.memory import Budgets, DoesNotFit, memory_of
from perf_model.prediction.overlap_windows import Windows
from perf_model.prediction.simulate import simulate
from perf_model.replanning.decision import describe_moves
from perf_model.replanning.measurements import WindowMeasurement
from perf_model.replanning.policy import ReplanningPolicy
from perf_model.replanning.rates import Cause, RelativeRates
from perf_model.schedule.cutting import BORDER_MULTIPLE
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.rules import PlacementRule, PlacementRules
from perf_model.schedule.workload import Partition, Workload
from tests.model.costs import cost

CPU, STREAMED, RESIDENT = Placement.CPU, Placement.STREAMED, Placement.RESIDENT
NUMEL = BORDER_MULTIPLE * 2_000_000
WINDOWS = Windows(backward_s=0.05, forward_s=0.05)
REQUEST = PlanRequest(
    sub_groups=[[Partition(f"layers.{layer}.weight", NUMEL) for layer in range(16)]],
    unit_sizes=(NUMEL,),
    cost=cost(cpu=1.5e9, h2d=25e9, d2h=26e9, both=42e9, dram=90e9, gpu=8e10, latency=1e-5),
    budgets=Budgets(gpu_bytes=2 * 10**9),
    windows=Windows(),
)


def start(request: PlanRequest = REQUEST) -> ReplanningPolicy:
    return ReplanningPolicy(request, request.plan().plan)


def measure(plan: UpdatePlan, last_step: int, windows: Windows, scale: float, *cause: Resource) -> WindowMeasurement:
    """Return the measurement of a window in which ``plan`` ran with the scaled capacity of ``cause``."""
    key: Cause = cause
    true = RelativeRates(scales={key: scale}).apply(REQUEST.cost)
    timeline = simulate(plan.schedule, plan.workload, true, windows)
    return WindowMeasurement(
        first_step=max(1, last_step - 49),
        last_step=last_step,
        by_kind=timeline.seconds_by_kind(),
        windows=windows,
        exposed_s=windows.exposed_s(timeline, plan.workload, true),
    )


def with_windows_known(policy: ReplanningPolicy) -> ReplanningPolicy:
    policy.observe(measure(policy.running, 5, WINDOWS, 1.0))
    return policy


def test_the_first_windows_lead_to_the_plan_for_them_with_the_rates_of_the_profile() -> None:
    """Check that the rates of the first steps, which are often slow, are not planned with."""
    policy = start()
    decision = policy.observe(measure(policy.running, 5, WINDOWS, 0.3, Resource.CPU))
    expected = replace(REQUEST, windows=WINDOWS).plan()
    assert decision is not None
    assert decision.chosen.plan == policy.running == expected.plan
    assert decision.after_s == expected.planned.exposed_s < decision.before_s
    assert "50.0 ms of backward and 50.0 ms of forward measured in steps 1 to 5" in str(decision)


def test_new_budgets_are_planned_for_with_the_windows_measured_at_the_same_time() -> None:
    policy = with_windows_known(start())
    budgets, shorter = Budgets(gpu_bytes=4 * 10**9), Windows(backward_s=0.01, forward_s=0.02)
    decision = policy.observe(measure(policy.running, 60, shorter, 1.0), budgets)
    expected = replace(REQUEST, windows=shorter, budgets=budgets).plan()
    before = replace(REQUEST, windows=WINDOWS, budgets=budgets).plan()
    assert expected.plan != before.plan, "the windows matter"
    assert decision is not None
    assert decision.chosen.plan == policy.running == expected.plan
    assert decision.after_s == expected.planned.exposed_s


def test_the_first_windows_are_planned_for_together_with_memory_and_order() -> None:
    policy = start()
    budgets, names = Budgets(gpu_bytes=4 * 10**9), [partition.name for partition in reversed(REQUEST.sub_groups[0])]
    decision = policy.observe(measure(policy.running, 5, WINDOWS, 1.0), budgets, names)
    expected = replace(REQUEST, windows=WINDOWS, budgets=budgets, uses=names).plan()
    assert decision is not None
    assert decision.chosen.plan == expected.plan
    assert "GPU memory for states 2.0 GB -> 4.0 GB at step 5" in str(decision)


def test_a_plan_that_does_not_gain_is_not_adopted() -> None:
    policy = with_windows_known(start())
    before = policy.running
    assert policy.observe(measure(before, 50, WINDOWS, 1.0)) is None
    assert policy.change_budgets(60, REQUEST.budgets) is None
    assert policy.running is before


def test_a_slow_cpu_must_gain_in_two_consecutive_windows() -> None:
    policy = with_windows_known(start())
    before = policy.running
    assert policy.observe(measure(before, 100, WINDOWS, 0.5, Resource.CPU)) is None
    assert policy.observe(measure(before, 125, WINDOWS, 1.0)) is None, "that was a transient"
    assert policy.observe(measure(before, 150, WINDOWS, 0.5, Resource.CPU)) is None
    decision = policy.observe(measure(before, 175, WINDOWS, 0.5, Resource.CPU))
    assert decision is not None
    assert decision.after_s < 0.9 * decision.before_s
    assert decision.chosen.plan.numel(CPU) < before.numel(CPU)
    line = str(decision)
    assert line.startswith("CPU updates at 0.50 of the profile since about step 101: ")
    assert "from cpu to streamed" in line
    assert line.endswith(f"predicted exposed time {decision.before_s * 1e3:.3g} ms -> {decision.after_s * 1e3:.3g} ms")


def test_a_later_reason_names_the_first_windows_with_which_the_plan_was_kept() -> None:
    policy = ReplanningPolicy(REQUEST, replace(REQUEST, windows=WINDOWS).plan().plan)
    assert policy.observe(measure(policy.running, 5, WINDOWS, 1.0)) is None
    longer = Windows(backward_s=0.05, forward_s=0.165)
    assert policy.observe(measure(policy.running, 50, longer, 1.0)) is None
    reason = str(policy.observe(measure(policy.running, 75, longer, 1.0)))
    assert reason.startswith("forward 50.0 ms -> 165 ms since about step 1: ")


def test_longer_windows_change_the_plan_as_rates_do() -> None:
    policy = with_windows_known(start())
    longer = Windows(backward_s=0.05, forward_s=0.165)
    assert policy.observe(measure(policy.running, 50, longer, 1.0)) is None
    decision = policy.observe(measure(policy.running, 75, longer, 1.0))
    assert decision is not None
    assert "forward 50.0 ms -> 165 ms since about step 1" in str(decision)


def test_a_third_change_in_a_short_time_needs_twice_as_many_windows() -> None:
    policy = with_windows_known(start())
    needed = []
    for slow in (True, False, True):
        for count in range(1, 10):
            scale = 0.5 if slow else 1.0
            measured = measure(policy.running, 50 * len(needed) + 25 * count, WINDOWS, scale, Resource.CPU)
            if policy.observe(measured) is not None:
                needed.append(count)
                break
    assert needed == [2, 2, 4]


def test_more_memory_is_used_at_once() -> None:
    policy = with_windows_known(start())
    before = policy.running
    decision = policy.change_budgets(8, Budgets(gpu_bytes=6 * 10**9))
    assert decision is not None
    assert policy.running.numel(RESIDENT) > before.numel(RESIDENT)
    assert str(decision).startswith("GPU memory for states 2.0 GB -> 6.0 GB at step 8: ")


@pytest.mark.parametrize("share", [0.9, 0.5, 0.1, 0.0])
def test_a_plan_that_no_longer_fits_is_replaced_at_once_by_one_that_does(share: float) -> None:
    policy = with_windows_known(start())
    tight = Budgets(gpu_bytes=int(share * memory_of(policy.running, REQUEST.setup).gpu_bytes))
    decision = policy.change_budgets(9, tight)
    assert decision is not None
    assert not tight.missing(memory_of(policy.running, REQUEST.setup))
    assert decision.after_s >= decision.before_s, "it is slower, but it fits"


def test_less_memory_than_before_changes_nothing_if_the_plan_fits() -> None:
    policy = with_windows_known(start())
    enough = Budgets(gpu_bytes=memory_of(policy.running, REQUEST.setup).gpu_bytes)
    assert policy.change_budgets(9, enough) is None


def test_placements_that_rules_fix_and_that_do_not_fit_any_more_are_an_error() -> None:
    rules = PlacementRules((PlacementRule(("layers.3.*",), "resident"),))
    policy = start(replace(REQUEST, rules=rules))
    with pytest.raises(DoesNotFit):
        policy.change_budgets(9, Budgets(gpu_bytes=10**6))
    assert policy.running.placements[3] is RESIDENT


def test_moves_are_counted_by_their_placements_and_the_most_frequent_come_first() -> None:
    workload = Workload.from_numels([NUMEL] * 4)
    before = UpdatePlan(workload=workload, placements=(CPU, CPU, STREAMED, RESIDENT), num_slots=2)
    after = UpdatePlan(workload=workload, placements=(STREAMED, STREAMED, RESIDENT, RESIDENT), num_slots=2)
    moves = describe_moves(before, after)
    assert moves == "2 units from cpu to streamed, 1 unit from streamed to resident, 1 -> 2 slots"
    assert describe_moves(before, replace(before, order=(3, 2, 1, 0))) == "another order of the same placements"
    recut = UpdatePlan(workload=Workload.from_numels([NUMEL] * 2), placements=(CPU, STREAMED), num_slots=1)
    assert describe_moves(before, recut) == "2 units instead of 4 (1 cpu, 1 streamed)"
