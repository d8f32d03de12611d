"""The planner: as good as looking at every plan, never worse than a rule, within its budget, the same every time."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perf_model.check import check
from perf_model.cost import CostModel, Resource
from perf_model.placement import Placement, place_all, place_by_fraction, place_by_stride
from perf_model.plan import UpdatePlan
from perf_model.planner import MAX_SLOTS, plan_updates
from perf_model.simulate import Simulator, simulate
from perf_model.timeline import Timeline
from perf_model.workload import Workload
from tests.model.costs import cost, costs

workloads = st.one_of(
    st.builds(lambda numel, count: Workload.of([numel] * count), st.integers(10**6, 10**8), st.integers(1, 40)),
    st.builds(Workload.of, st.lists(st.integers(10**6, 10**8), min_size=1, max_size=30)),
)


def predicted_s(workload: Workload, placements: tuple[Placement, ...], num_slots: int, model: CostModel) -> float:
    plan = UpdatePlan(workload=workload, placements=placements, num_slots=num_slots)
    return simulate(plan.schedule, workload, model).makespan_s


@settings(max_examples=25)
@given(st.lists(st.integers(10**6, 10**8), min_size=1, max_size=6), costs)
def test_with_few_sub_groups_it_is_as_good_as_looking_at_every_plan(numels: list[int], model: CostModel) -> None:
    workload = Workload.of(numels)
    every = (
        predicted_s(workload, placements, num_slots, model)
        for placements in product(Placement, repeat=len(numels))
        for num_slots in range(1, MAX_SLOTS + 1)
    )
    assert plan_updates(workload, model).predicted_s == pytest.approx(min(every), rel=1e-9)


@settings(max_examples=50)
@given(workloads, costs)
def test_it_is_never_worse_than_a_rule_and_never_better_than_the_bound(workload: Workload, model: CostModel) -> None:
    planned = plan_updates(workload, model)
    check(planned.plan.schedule, workload)
    rules = [
        place_all(workload, Placement.CPU),
        place_all(workload, Placement.STREAMED),
        place_by_stride(workload, 2),
        place_by_stride(workload, 5),
        place_by_fraction(workload, planned.bound.streamed_fraction),
    ]
    for placements in rules:
        most = max(1, min(MAX_SLOTS, placements.count(Placement.STREAMED)))
        assert planned.predicted_s <= predicted_s(workload, placements, most, model) * (1 + 1e-9)
    assert planned.predicted_s == predicted_s(workload, planned.plan.placements, planned.plan.num_slots, model)
    assert planned.ratio_to_bound >= 1 - 1e-6


@settings(max_examples=50)
@given(workloads, costs, st.integers(0, 10**10))
def test_slots_fit_the_budget(workload: Workload, model: CostModel, staging_bytes: int) -> None:
    plan = plan_updates(workload, model, staging_bytes).plan
    assert plan.schedule.staging_bytes <= staging_bytes
    if staging_bytes < 16 * 10**6:
        assert set(plan.placements) == {Placement.CPU}


@given(workloads, costs)
@settings(max_examples=20)
def test_the_same_every_time(workload: Workload, model: CostModel) -> None:
    assert plan_updates(workload, model) == plan_updates(workload, model)


def test_a_slow_cpu_streams_everything_and_a_slow_bus_nothing() -> None:
    workload = Workload.of([10**8] * 20)
    slow_cpu = plan_updates(workload, cost(cpu=1e7)).plan
    assert slow_cpu.placements.count(Placement.CPU) == 0
    slow_bus = plan_updates(workload, cost(h2d=5e8, d2h=5e8)).plan
    assert slow_bus.placements.count(Placement.STREAMED) == 0


def test_in_between_it_comes_close_to_the_bound() -> None:
    """A CPU and a bus of equal strength: half of the work each, but for the first and the last sub-group."""
    planned = plan_updates(Workload.of([10**8] * 200), cost(d2h=16e9))
    assert planned.bound.binding in (Resource.CPU, Resource.H2D)
    assert 90 <= planned.plan.placements.count(Placement.STREAMED) <= 110
    assert planned.ratio_to_bound < 1.03


def test_fewer_slots_where_more_do_not_help() -> None:
    workload = Workload.of([10**8] * 30)
    planned = plan_updates(workload, cost(cpu=1e7))
    times = {slots: predicted_s(workload, planned.plan.placements, slots, cost(cpu=1e7)) for slots in range(1, 5)}
    assert planned.plan.num_slots == min(slots for slots, time_s in times.items() if time_s <= planned.predicted_s)
    assert planned.plan.num_slots < MAX_SLOTS


def test_a_thousand_sub_groups_are_planned_with_a_bounded_number_of_simulations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls, original = [], Simulator.run

    def counted(self: Simulator, *arguments: Any) -> Timeline:
        calls.append(1)
        return original(self, *arguments)

    monkeypatch.setattr(Simulator, "run", counted)
    plan_updates(Workload.of([10**8] * 1000), cost(dram=90e9, both=22e9))
    assert len(calls) <= 30


def test_nothing_to_plan_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one sub-group, found none"):
        plan_updates(Workload.of([]), cost())
