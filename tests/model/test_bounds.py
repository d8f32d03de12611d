"""The bounds: by hand where that is possible, and beaten by no schedule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.harness.fill_and_drain import bound_with_fill_and_drain, fill_and_drain_s
from perf_model.prediction.cost import CostModel, Resource
from perf_model.prediction.memory import cuda_bytes_of, gradients_on_accelerator, memory_of, resident_bytes_of
from perf_model.prediction.overlap_windows import Windows
from perf_model.prediction.simulate import simulate
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.schedule import Schedule
from perf_model.schedule.workload import Workload
from perf_model.search.bounds import MOST_SHARED_BYTES, Room, exposed_bound, first_needed_bound, work_bound
from perf_model.search.budgets import Budgets
from perf_model.search.pruning import Floor, MemoryFloor, placed
from tests.model.costs import cost, costs, windows
from tests.model.strategies import plans, schedules

NUMEL = 10**9

NOT_ABOVE = 1 - 1e-6
"""Sums in another order."""


def resident_share(schedule: Schedule, workload: Workload) -> float:
    streamed = {action.sub_group for action in schedule.actions if action.slot is not None}
    actions = [action.sub_group for action in schedule.actions]
    residents = [its for its in workload.sub_groups if actions.count(its.index) == 1 and its.index not in streamed]
    return sum(its.numel for its in residents) / workload.numel


@given(schedules(), costs, windows)
def test_no_schedule_beats_the_bounds(drawn: tuple[Schedule, Workload], model: CostModel, beside: Windows) -> None:
    schedule, workload = drawn
    room = Room.same(resident_share(schedule, workload))
    timeline = simulate(schedule, workload, model, beside)
    bound = work_bound(workload.numel, model, room)
    assert timeline.active_s >= bound.seconds * NOT_ABOVE
    exposed_s = exposed_bound(workload.numel, model, beside, room).seconds
    assert beside.exposed_s(timeline, workload) >= exposed_s * NOT_ABOVE
    first_s = first_needed_bound(workload, model, beside, room).seconds
    assert beside.exposed_s(timeline, workload) >= first_s * NOT_ABOVE
    assert 0 <= bound.mix.streamed <= 1
    assert 0 <= bound.mix.resident <= room.alone


@given(plans(10**8), costs, windows)
def test_no_plan_beats_what_its_memory_leaves_it(plan: UpdatePlan, model: CostModel, beside: Windows) -> None:
    """With fill and drain, with room by the bytes that the plan takes, and floors of that very placement."""
    workload = plan.workload
    room = Room.of(workload, memory_of(plan).gpu_bytes)
    timeline = simulate(plan.schedule, workload, model, beside)
    exposed_s = beside.exposed_s(timeline, workload)
    assert exposed_s >= exposed_bound(workload.numel, model, beside, room).seconds * NOT_ABOVE
    assert exposed_s >= first_needed_bound(workload, model, beside, room).seconds * NOT_ABOVE
    candidate = placed([plan.placements])
    floor = Floor(workload, model, beside)
    assert exposed_s >= floor.at_least_s(candidate, plan.num_slots)[0] * NOT_ABOVE
    assert exposed_s >= floor.in_slots_at_least_s(plan.placements, plan.num_slots) * NOT_ABOVE
    alone_s = simulate(plan.schedule, workload, model).end_s
    assert alone_s >= bound_with_fill_and_drain(workload, model, room).seconds * NOT_ABOVE
    assert fill_and_drain_s(workload, model, room) >= 0


@given(plans(10**8))
def test_memory_is_never_less_than_its_floor(plan: UpdatePlan) -> None:
    memory = memory_of(plan)
    taken = Budgets(gpu_bytes=memory.gpu_bytes, host_bytes=memory.host_bytes, pinned_bytes=memory.pinned_bytes)
    assert MemoryFloor(plan.workload, 2).missing_bytes(placed([plan.placements]), taken)[0] == 0
    too_little = Budgets(host_bytes=memory.host_bytes - 1)
    assert MemoryFloor(plan.workload, 2).missing_bytes(placed([plan.placements]), too_little)[0] == 1


def test_the_bound_names_what_binds() -> None:
    streamed = work_bound(NUMEL, cost(cpu=1e7))
    assert streamed.binding in (Resource.H2D, Resource.CPU), "both are busy until the end"
    assert streamed.mix.streamed > 0.98
    on_cpu = work_bound(NUMEL, cost(h2d=1e9, d2h=1e9))
    assert on_cpu.binding in (Resource.CPU, Resource.H2D)
    # x on the CPU takes x s, 1 - x streamed takes 12 (1 - x) + 2 x s to the accelerator: they meet at x = 12/11 > 1.
    assert on_cpu.seconds == pytest.approx(2.0)
    assert work_bound(NUMEL, cost(dram=1e9)).binding is Resource.DRAM
    # 12 (1 - x) + 2 x = 12 x: everything is busy until the end.
    assert work_bound(NUMEL, cost()).seconds == pytest.approx(12 / 22)


def test_residents_take_work_off_all_but_the_gpu() -> None:
    half = work_bound(NUMEL, cost(), Room.same(0.5))
    assert half.seconds == pytest.approx(12 / 22 / 2)
    assert half.mix.resident == 0.5
    # A GPU ten times as fast as the CPU: each its share.
    shared = work_bound(NUMEL, cost(gpu=1e10), Room.same(1.0))
    assert shared.mix.resident == pytest.approx(10 / 11)
    assert shared.seconds == pytest.approx(1 / 11)


def test_room_for_residents_is_counted_in_whole_sub_groups() -> None:
    workload = Workload.of([10**7] * 10)
    each = resident_bytes_of(10**7)
    assert Room.of(workload, None) == Room.same(1.0)
    assert Room.of(workload, 0) == Room(prefetched=0.0)
    # Room for all gradients is kept free, but for what segments may share.
    kept = cuda_bytes_of(gradients_on_accelerator([10**7] * 10, 2)) - MOST_SHARED_BYTES
    for gpu_bytes in (kept + 3 * each, kept + 4 * each - 1):
        three, two = pytest.approx(0.3), pytest.approx(0.2)
        assert Room.of(workload, gpu_bytes) == Room(alone=three, beside_a_slot=two, prefetched=three)


@given(costs, windows)
def test_windows_lower_the_exposed_bound_and_never_below_zero(model: CostModel, beside: Windows) -> None:
    work_s = work_bound(NUMEL, model).seconds
    exposed_s = exposed_bound(NUMEL, model, beside).seconds
    assert max(0.0, work_s - beside.backward_s - beside.forward_s) * (1 - 1e-9) <= exposed_s <= work_s
    assert exposed_bound(NUMEL, model, Windows()).seconds == work_s


def test_backward_hides_prefetches_only() -> None:
    # Streamed is next to nothing: 2 s of publishing, which only forward can hide.
    on_cpu = cost(h2d=1e9, d2h=1e9)
    assert exposed_bound(NUMEL, on_cpu, Windows(forward_s=0.5)).seconds == pytest.approx(1.5)
    # With any number of prefetches hidden: x on the CPU is published in 2 x s, 1 - x flushed in 12 (1 - x) s.
    assert exposed_bound(NUMEL, on_cpu, Windows(backward_s=100.0)).seconds == pytest.approx(12 / 7)
    # A window that is too short: of 12 s of prefetches 1 s is hidden.
    of_flushes = exposed_bound(NUMEL, cost(cpu=1e3, h2d=1e9, d2h=4e9), Windows(backward_s=100.0))
    assert of_flushes.seconds == pytest.approx(3, rel=1e-3)
    assert of_flushes.binding is Resource.D2H
    # No more than there is room for: of 12 s of prefetches a quarter.
    slow_cpu = cost(cpu=1e3, h2d=1e9)
    quarter = exposed_bound(NUMEL, slow_cpu, Windows(backward_s=100.0), Room(prefetched=0.25))
    assert quarter.seconds == pytest.approx(9, rel=1e-3)
    # Residents take of that room.
    taken = exposed_bound(
        NUMEL, slow_cpu, Windows(backward_s=100.0), Room(alone=0.25, beside_a_slot=0.25, prefetched=0.25)
    )
    assert taken.seconds == pytest.approx(9, rel=1e-3), "a quarter resident, and 9 s of prefetches"
    assert exposed_bound(NUMEL, slow_cpu, Windows(backward_s=1.0)).seconds == pytest.approx(11, rel=1e-3)


@pytest.mark.parametrize(
    ("changes", "room", "seconds", "binding"),
    [
        # 1 s on the CPU and 1/6 s to publish, or 1 ms on the GPU once it is there.
        ({}, Room(prefetched=0.0), 1 + 1 / 6, Resource.CPU),
        ({}, Room.same(1.0), 1e-3, Resource.GPU),
        ({}, Room(), 0.25 + 1e-3, Resource.H2D),
        ({"cpu": 1e11, "h2d": 1e9}, Room(), 0.01 + 2, Resource.H2D),
    ],
)
def test_forward_waits_for_the_first_sub_group(
    changes: dict[str, float], room: Room, seconds: float, binding: Resource
) -> None:
    workload = Workload.of([10**9, 10**6])
    found = first_needed_bound(workload, cost(**changes), Windows(backward_s=0.75, forward_s=100.0), room)
    assert found.seconds == pytest.approx(seconds)
    assert found.binding is binding


def test_fill_and_drain_by_hand() -> None:
    """Streamed only: nothing is flushed until one was prefetched and updated, and nothing prefetched in the last."""
    workload = Workload.of([10**8] * 10)
    model = cost(cpu=1e6, d2h=16e9)
    bound_s = work_bound(workload.numel, model).seconds
    # 0.1 s a prefetch: with nearly everything streamed the h2d direction is busy for 1 s, and stands still while the
    # last sub-group is updated and flushed: 0.1 ms and 75 ms.
    assert bound_s == pytest.approx(1.0, rel=0.01)
    streamed = UpdatePlan(workload=workload, placements=(Placement.STREAMED,) * 10, num_slots=4)
    simulated_s = simulate(streamed.schedule, workload, model).end_s
    assert simulated_s == pytest.approx(1.0 + 1e-4 + 0.075, rel=1e-3)
    assert fill_and_drain_s(workload, model) == pytest.approx(simulated_s - bound_s, rel=0.05)


@given(st.integers(1, 20), costs)
def test_more_of_the_same_takes_longer_by_its_work(count: int, model: CostModel) -> None:
    """Fill and drain are of one sub-group, however many there are."""
    few, many = (bound_with_fill_and_drain(Workload.of([10**7] * n), model).seconds for n in (count, 2 * count))
    assert few <= many <= 2 * few * (1 + 1e-9)
