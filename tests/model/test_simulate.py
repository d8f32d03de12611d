"""The simulation: exact in cases that can be worked out by hand, within the bounds everywhere."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perf_model.action import ActionKind, Lane
from perf_model.bounds import Windows, exposed_bound, work_bound
from perf_model.cost import CostModel, Load, Resource
from perf_model.placement import Placement, place_all, place_by_stride
from perf_model.plan import UpdatePlan
from perf_model.schedule import Schedule
from perf_model.sharing import speeds
from perf_model.simulate import simulate
from perf_model.workload import Workload
from tests.model.costs import cost, costs
from tests.model.strategies import schedules

CPU, STREAMED = Placement.CPU, Placement.STREAMED


def plan(placements: tuple[Placement, ...], num_slots: int, numel: int = 10**9) -> UpdatePlan:
    return UpdatePlan(workload=Workload.of([numel] * len(placements)), placements=placements, num_slots=num_slots)


def makespan_s(update_plan: UpdatePlan, model: CostModel) -> float:
    return simulate(update_plan.schedule, update_plan.workload, model).makespan_s


# By hand. A sub-group has 10^9 parameters: 1 s on the CPU, 1/8 s to publish; 1 s to prefetch, 1 ms, 1 s to flush.


def test_cpu_updates_hide_every_publish_but_the_last() -> None:
    assert makespan_s(plan((CPU,) * 4, 1), cost()) == pytest.approx(4 + 1 / 8)


def test_one_slot_runs_in_series_and_two_overlap() -> None:
    assert makespan_s(plan((STREAMED,) * 4, 1), cost()) == pytest.approx(4 * (1 + 1e-3 + 1))
    # The third prefetch waits for the first flush; from then on one second a direction and sub-group.
    assert makespan_s(plan((STREAMED,) * 4, 2), cost()) == pytest.approx(1 + 4 + 3e-3, abs=2e-3)


def test_directions_slow_each_other_by_their_joint_limit() -> None:
    # 28 GB/s alone, 14 together: two overlapping seconds take twice as long.
    alone, together = (makespan_s(plan((STREAMED,) * 40, 4), cost(both=both)) for both in (28e9, 14e9))
    assert together / alone == pytest.approx(2, rel=0.05)


def test_host_memory_is_shared_by_updates_and_transfers() -> None:
    # The CPU step alone moves 42 GB/s, as much as there is: 12 s of CPU work and the transfers' bytes come after it.
    mixed = plan(place_by_stride(Workload.of([0] * 24), 2), 2)
    moved = 12 * (42 + 2) + 12 * (16 + 12)
    assert makespan_s(mixed, cost(dram=42e9)) >= moved / 42
    assert makespan_s(mixed, cost(dram=42e9)) > 1.4 * makespan_s(mixed, cost())


def test_latency_is_paid_once_a_copy() -> None:
    assert makespan_s(plan((STREAMED,), 1), cost(latency=0.1)) == pytest.approx(1 + 0.4 + 1e-3 + 1 + 0.3)


def test_the_host_stands_still_before_a_publish() -> None:
    """What is issued after a PUBLISH that waits for the worker starts no earlier, as in the executor."""
    text = """
        schedule slots 1 slot_numel 1000000000 staging_bytes 16000000000
        CPU_STEP 0
        PUBLISH 0 after CPU_STEP 0
        PREFETCH 1 slot 0
        GPU_STEP 1 slot 0 after PREFETCH 1
        FLUSH_STATES 1 slot 0 after GPU_STEP 1
    """
    timeline = simulate(Schedule.parse(text), Workload.of([10**9] * 2), cost())
    starts = {span.action.name: span.start_s for span in timeline.spans}
    assert starts["PREFETCH 1"] == pytest.approx(1 + 1 / 8)


def test_fair_sharing_slows_alike_and_leaves_nothing_unused() -> None:
    loads = [
        Load(1.0, {Resource.DRAM: 60.0}),
        Load(1.0, {Resource.DRAM: 60.0, Resource.H2D: 10.0}),
        Load(2.0, {Resource.D2H: 10.0}),
    ]
    capacities = {Resource.DRAM: 90.0, Resource.H2D: 100.0, Resource.D2H: 100.0}
    assert speeds(loads, capacities) == pytest.approx([0.75, 0.75, 0.5])


# Everywhere


@given(schedules(), costs)
def test_a_simulation_respects_lanes_waits_and_every_capacity(
    drawn: tuple[Schedule, Workload], model: CostModel
) -> None:
    schedule, workload = drawn
    timeline = simulate(schedule, workload, model)
    assert tuple(span.action for span in timeline.spans) == schedule.actions
    ends = {span.action.name: span.end_s for span in timeline.spans}
    lane_ends = dict.fromkeys(Lane, 0.0)
    used = dict.fromkeys(Resource, 0.0)
    for span in timeline.spans:
        action, numel = span.action, workload.sub_groups[span.action.sub_group].numel
        load = model.load(action.kind, numel)
        assert span.start_s >= max([lane_ends[action.lane], *(ends[name] for name in action.waits)])
        assert span.end_s - span.start_s >= load.alone_s * (1 - 1e-6)
        lane_ends[action.lane] = span.end_s
        for resource, amount in load.amounts.items():
            used[resource] += amount
    for resource, amount in used.items():
        assert amount <= model.capacities[resource] * timeline.makespan_s * (1 + 1e-6), resource


@given(schedules(), costs)
def test_no_schedule_beats_the_bound(drawn: tuple[Schedule, Workload], model: CostModel) -> None:
    schedule, workload = drawn
    bound = work_bound(workload.numel, model)
    assert simulate(schedule, workload, model).makespan_s >= bound.seconds * (1 - 1e-6)
    assert 0 <= bound.streamed_fraction <= 1


def test_the_bound_names_what_binds() -> None:
    numel = 10**9
    streamed = work_bound(numel, cost(cpu=1e7))
    assert streamed.binding is Resource.H2D
    assert streamed.streamed_fraction > 0.98
    on_cpu = work_bound(numel, cost(h2d=1e9, d2h=1e9))
    assert on_cpu.binding in (Resource.CPU, Resource.H2D)
    # x on the CPU takes x s, 1 - x streamed takes 16 (1 - x) + 2 x s to the accelerator: they meet at x = 16/15 > 1.
    assert on_cpu.seconds == pytest.approx(2.0)
    assert work_bound(numel, cost(dram=1e9)).binding is Resource.DRAM
    # 16 (1 - x) + 2 x = 16 x: everything is busy until the end.
    assert work_bound(numel, cost()).seconds == pytest.approx(16 / 30)


@given(costs, st.floats(0, 2), st.floats(0, 2))
def test_windows_lower_the_exposed_bound_and_never_below_zero(
    model: CostModel, backward_s: float, forward_s: float
) -> None:
    work = work_bound(10**9, model).seconds
    exposed = exposed_bound(10**9, model, Windows(backward_s=backward_s, forward_s=forward_s)).seconds
    assert max(0.0, work - backward_s - forward_s) * (1 - 1e-9) <= exposed <= work
    assert exposed_bound(10**9, model, Windows()).seconds == work


def test_everything_on_one_side_costs_what_its_chain_does() -> None:
    model = cost()
    for placement, seconds in ((CPU, 1.0), (STREAMED, 1.0)):
        update_plan = UpdatePlan(
            workload=Workload.of([10**8] * 10), placements=place_all(Workload.of([0] * 10), placement), num_slots=3
        )
        assert makespan_s(update_plan, model) == pytest.approx(seconds, rel=0.25)
    assert model.load(ActionKind.CPU_STEP, 10**9).alone_s == pytest.approx(1.0)
