"""Test the lower bounds: against results by hand, and against schedules, none of which may beat them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.planner.fill_and_drain import bound_with_fill_and_drain, fill_and_drain_s
from perf_model.prediction.cost import CostModel, Resource
from perf_model.prediction.memory import SIXTEEN_BIT, TrainingSetup, block_bytes_of, memory_of, resident_bytes_of
from perf_model.prediction.overlap_windows import Windows
from perf_model.prediction.simulate import simulate
from perf_model.schedule.host_layout import Widths
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.schedule import Schedule
from perf_model.schedule.workload import Workload
from perf_model.search.bounds import exposed_bound, first_needed_bound, work_bound
from perf_model.search.capacity import ResidentCapacity
from perf_model.search.pruning import MemoryLowerBounds, TimeLowerBounds, placement_masks
from tests.model.costs import cost, costs, windows
from tests.model.strategies import plans, schedules

NUMEL = 10**9

NOT_ABOVE = 1 - 1e-6
"""A factor that allows for the rounding of sums in another order."""


def resident_share(schedule: Schedule, workload: Workload) -> float:
    streamed = {action.unit for action in schedule.actions if action.slot is not None}
    actions = [action.unit for action in schedule.actions]
    residents = [unit for unit in workload.units if actions.count(unit.index) == 1 and unit.index not in streamed]
    return sum(unit.numel for unit in residents) / workload.numel


@given(schedules(), costs, windows)
def test_no_schedule_beats_the_bounds(drawn: tuple[Schedule, Workload], model: CostModel, overlap: Windows) -> None:
    schedule, workload = drawn
    capacity = ResidentCapacity.uniform(resident_share(schedule, workload))
    timeline = simulate(schedule, workload, model, overlap)
    bound = work_bound(workload.numel, model, capacity)
    assert timeline.active_s >= bound.seconds * NOT_ABOVE
    exposed_s = exposed_bound(workload.numel, model, overlap, capacity).seconds
    assert overlap.exposed_s(timeline, workload, model) >= exposed_s * NOT_ABOVE
    first_s = first_needed_bound(workload, model, overlap, capacity).seconds
    assert overlap.exposed_s(timeline, workload, model) >= first_s * NOT_ABOVE
    assert 0 <= bound.shares.streamed <= 1
    assert 0 <= bound.shares.resident <= capacity.alone


setups = st.builds(
    TrainingSetup,
    widths=st.builds(Widths, param=st.just(2), grad=st.sampled_from([2, 4]), publishes=st.booleans()),
    accumulates=st.booleans(),
    params_on_host=st.booleans(),
    longest_partition_numel=st.one_of(st.none(), st.integers(1, 10**8)),
)


@given(plans(10**8), costs, windows, setups)
def test_no_plan_beats_the_bounds_of_its_gpu_memory(
    plan: UpdatePlan, model: CostModel, overlap: Windows, setup: TrainingSetup
) -> None:
    """Check all bounds, with the capacity of exactly the GPU memory that the plan takes."""
    workload = plan.workload
    capacity = ResidentCapacity.from_gpu_bytes(workload, memory_of(plan, setup).gpu_bytes, setup)
    timeline = simulate(plan.schedule, workload, model, overlap)
    exposed_s = overlap.exposed_s(timeline, workload, model)
    assert exposed_s >= exposed_bound(workload.numel, model, overlap, capacity).seconds * NOT_ABOVE
    assert exposed_s >= first_needed_bound(workload, model, overlap, capacity).seconds * NOT_ABOVE
    candidate = placement_masks([plan.placements])
    time_bounds = TimeLowerBounds(workload, model, overlap)
    assert exposed_s >= time_bounds.exposed_s(candidate, plan.num_slots)[0] * NOT_ABOVE
    assert exposed_s >= time_bounds.exposed_s_with_slots(plan.placements, plan.num_slots) * NOT_ABOVE
    alone_s = simulate(plan.schedule, workload, model).end_s
    assert alone_s >= bound_with_fill_and_drain(workload, model, capacity).seconds * NOT_ABOVE
    assert fill_and_drain_s(workload, model, capacity) >= 0


@given(plans(10**8), setups)
def test_memory_is_never_less_than_its_lower_bound(plan: UpdatePlan, setup: TrainingSetup) -> None:
    least_bytes = MemoryLowerBounds(plan.workload, setup).gpu_bytes(placement_masks([plan.placements]))[0]
    taken_bytes = memory_of(plan, setup).gpu_bytes
    assert least_bytes <= taken_bytes
    assert (least_bytes > 0) == (set(plan.placements) != {Placement.CPU})


def test_the_bound_names_the_resource_that_binds() -> None:
    streamed = work_bound(NUMEL, cost(cpu=1e7))
    assert streamed.binding in (Resource.H2D, Resource.CPU), "both are busy until the end"
    assert streamed.shares.streamed > 0.98
    on_cpu = work_bound(NUMEL, cost(h2d=1e9, d2h=1e9))
    assert on_cpu.binding in (Resource.CPU, Resource.H2D)
    # x on the CPU takes x s, 1 - x streamed takes 12 (1 - x) + 2 x s to the accelerator: they meet at x = 12/11 > 1.
    assert on_cpu.seconds == pytest.approx(2.0)
    assert work_bound(NUMEL, cost(dram=1e9)).binding is Resource.DRAM
    # 12 (1 - x) + 2 x = 12 x: everything is busy until the end.
    assert work_bound(NUMEL, cost()).seconds == pytest.approx(12 / 22)


def test_residents_relieve_every_resource_but_the_gpu() -> None:
    half = work_bound(NUMEL, cost(), ResidentCapacity.uniform(0.5))
    assert half.seconds == pytest.approx(12 / 22 / 2)
    assert half.shares.resident == 0.5
    # The GPU is ten times as fast as the CPU: each gets its share.
    shared = work_bound(NUMEL, cost(gpu=1e10), ResidentCapacity.uniform(1.0))
    assert shared.shares.resident == pytest.approx(10 / 11)
    assert shared.seconds == pytest.approx(1 / 11)


def test_capacity_for_residents_is_counted_in_whole_units() -> None:
    workload = Workload.from_numels([10**7] * 10)
    states, gradient = resident_bytes_of(10**7, SIXTEEN_BIT), block_bytes_of(2 * 10**7)
    assert ResidentCapacity.from_gpu_bytes(workload, None) == ResidentCapacity.uniform(1.0)
    nothing = ResidentCapacity.from_gpu_bytes(workload, 0)
    assert (nothing.alone, nothing.with_a_slot, nothing.prefetched) == (0.0, 0.0, 0.0)
    # With accumulation, memory for all gradients is reserved; without, for those of the residents.
    for setup, reserved, each in (
        (TrainingSetup(accumulates=True), 10 * gradient, states),
        (TrainingSetup(), 0, states + gradient),
    ):
        for gpu_bytes in (reserved + 4 * each, reserved + 5 * each - 1):
            capacity = ResidentCapacity.from_gpu_bytes(workload, gpu_bytes, setup)
            assert capacity.alone == pytest.approx(0.4)
            assert capacity.prefetched == pytest.approx(0.4)
            assert capacity.with_a_slot == pytest.approx(0.3)


def test_the_gradients_of_streamed_parameters_leave_less_memory_for_residents() -> None:
    workload = Workload.from_numels([10**7] * 20)
    states, gradient = resident_bytes_of(10**7, SIXTEEN_BIT), block_bytes_of(2 * 10**7)
    # One slot, and either one streamed unit and three residents, or two residents and more streamed units.
    capacity = ResidentCapacity.from_gpu_bytes(workload, 4 * states + 4 * gradient)
    assert capacity.next_to_streamed(0.05) == pytest.approx(0.15)
    streamed = (states + 2 * gradient) / gradient / 20
    assert capacity.next_to_streamed(streamed) == pytest.approx(0.1)
    # With memory for a slot and three gradients, three of the units can be streamed.
    few = ResidentCapacity.from_gpu_bytes(workload, states + 3 * gradient)
    assert few.most_streamed == pytest.approx(0.15)
    slow_cpu = cost(cpu=1e7)
    assert work_bound(workload.numel, slow_cpu, few).shares.streamed == pytest.approx(0.15)
    all_fit = ResidentCapacity.from_gpu_bytes(workload, states + 20 * gradient)
    assert work_bound(workload.numel, slow_cpu, all_fit).shares.streamed > 0.9


@given(costs, windows)
def test_windows_lower_the_exposed_bound_and_never_below_zero(model: CostModel, overlap: Windows) -> None:
    work_s = work_bound(NUMEL, model).seconds
    exposed_s = exposed_bound(NUMEL, model, overlap).seconds
    assert max(0.0, work_s - overlap.backward_s - overlap.forward_s) * (1 - 1e-9) <= exposed_s <= work_s
    assert exposed_bound(NUMEL, model, Windows()).seconds == work_s


def test_backward_hides_prefetches_only() -> None:
    # Hardly anything is streamed: there are 2 s of publishing, which only forward can hide.
    on_cpu = cost(h2d=1e9, d2h=1e9)
    assert exposed_bound(NUMEL, on_cpu, Windows(forward_s=0.5)).seconds == pytest.approx(1.5)
    # All prefetches are hidden: x on the CPU is published in 2 x s, 1 - x flushed in 12 (1 - x) s.
    assert exposed_bound(NUMEL, on_cpu, Windows(backward_s=100.0)).seconds == pytest.approx(12 / 7)
    # All prefetches are hidden: flushing 12 B per parameter at 4 GB/s takes 3 s.
    of_flushes = exposed_bound(NUMEL, cost(cpu=1e3, h2d=1e9, d2h=4e9), Windows(backward_s=100.0))
    assert of_flushes.seconds == pytest.approx(3, rel=1e-3)
    assert of_flushes.binding is Resource.D2H
    # Only the prefetches that fit in memory are hidden: a quarter of 12 s.
    slow_cpu = cost(cpu=1e3, h2d=1e9)
    quarter = exposed_bound(NUMEL, slow_cpu, Windows(backward_s=100.0), ResidentCapacity(prefetched=0.25))
    assert quarter.seconds == pytest.approx(9, rel=1e-3)
    # Residents take memory from the prefetches.
    taken = exposed_bound(
        NUMEL, slow_cpu, Windows(backward_s=100.0), ResidentCapacity(alone=0.25, with_a_slot=0.25, prefetched=0.25)
    )
    assert taken.seconds == pytest.approx(9, rel=1e-3), "a quarter resident, and 9 s of prefetches"
    # A window that is too short hides 1 s of 12 s of prefetches.
    assert exposed_bound(NUMEL, slow_cpu, Windows(backward_s=1.0)).seconds == pytest.approx(11, rel=1e-3)


def test_with_a_window_of_forward_backward_also_hides_flushes() -> None:
    slow_cpu = cost(cpu=1e3, d2h=1e9)
    # 12 s of flushes: forward hides 1 s, and backward all others if every unit has a slot.
    assert exposed_bound(NUMEL, slow_cpu, Windows(forward_s=1.0)).seconds == pytest.approx(11, rel=1e-3)
    both = Windows(backward_s=100.0, forward_s=1.0)
    assert exposed_bound(NUMEL, slow_cpu, both).seconds == 0.0
    # The flushes from the slots that fit are a quarter of them.
    assert exposed_bound(NUMEL, slow_cpu, both, ResidentCapacity(prefetched=0.25)).seconds == pytest.approx(8, rel=1e-3)
    # Backward is 2 s long, and hides no more than that of prefetches and flushes.
    short = Windows(backward_s=2.0, forward_s=1.0)
    assert exposed_bound(NUMEL, slow_cpu, short).seconds == pytest.approx(9, rel=1e-3)


@pytest.mark.parametrize(
    ("changes", "capacity", "seconds", "binding"),
    [
        # 1 s on the CPU and 1/6 s to publish, or 1 ms on the GPU once it is there.
        ({}, ResidentCapacity(prefetched=0.0), 1 + 1 / 6, Resource.CPU),
        ({}, ResidentCapacity.uniform(1.0), 1e-3, Resource.GPU),
        ({}, ResidentCapacity(), 0.25 + 1e-3, Resource.H2D),
        ({"cpu": 1e11, "h2d": 1e9}, ResidentCapacity(), 0.01 + 2, Resource.H2D),
    ],
)
def test_forward_waits_for_the_first_unit(
    changes: dict[str, float], capacity: ResidentCapacity, seconds: float, binding: Resource
) -> None:
    workload = Workload.from_numels([10**9, 10**6])
    found = first_needed_bound(workload, cost(**changes), Windows(backward_s=0.75, forward_s=100.0), capacity)
    assert found.seconds == pytest.approx(seconds)
    assert found.binding is binding


def test_fill_and_drain_by_hand() -> None:
    """Check a plan that only streams: at first nothing can be flushed, and at last nothing is left to prefetch."""
    workload = Workload.from_numels([10**8] * 10)
    model = cost(cpu=1e6, d2h=16e9)
    bound_s = work_bound(workload.numel, model).seconds
    # A prefetch takes 0.1 s. With nearly everything streamed, the h2d direction is busy for 1 s. It is idle while the
    # last unit is updated (0.1 ms) and flushed (75 ms).
    assert bound_s == pytest.approx(1.0, rel=0.01)
    streamed = UpdatePlan(workload=workload, placements=(Placement.STREAMED,) * 10, num_slots=4)
    simulated_s = simulate(streamed.schedule, workload, model).end_s
    assert simulated_s == pytest.approx(1.0 + 1e-4 + 0.075, rel=1e-3)
    assert fill_and_drain_s(workload, model) == pytest.approx(simulated_s - bound_s, rel=0.05)


@given(st.integers(1, 20), costs)
def test_twice_as_many_units_take_at_most_twice_as_long(count: int, model: CostModel) -> None:
    """Check that fill and drain do not grow with the number of units."""
    workloads = (Workload.from_numels([10**7] * number) for number in (count, 2 * count))
    few, many = (bound_with_fill_and_drain(workload, model).seconds for workload in workloads)
    assert few <= many <= 2 * few * (1 + 1e-9)
