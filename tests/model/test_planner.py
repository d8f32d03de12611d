"""Test the planner: close to an exhaustive search, no worse than simple rules, within the budgets, deterministic."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perf_model.planner import LITTLE, MAX_SIMULATED_UNITS, MAX_SLOTS, PlannedUpdate
from perf_model.prediction.cost import CostModel, Resource
from perf_model.prediction.memory import (
    Budgets,
    DoesNotFit,
    MemoryKind,
    Reservation,
    cuda_bytes_of,
    memory_of,
)
from perf_model.prediction.overlap_windows import Windows
from perf_model.prediction.simulate import Simulator, simulate
from perf_model.prediction.slowdown import Slowdown
from perf_model.prediction.work_bound import work_bound
from perf_model.schedule.check import check
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan, place_all
from perf_model.schedule.workload import Workload
from tests.model.costs import cost, costs, resident_bytes_of, windows
from tests.model.planned import plan_updates

NO_WINDOWS = Windows()
NO_RESIDENTS = Budgets(gpu_bytes=0)

workloads = st.one_of(
    st.builds(
        lambda numel, count: Workload.from_numels([numel] * count), st.integers(10**6, 10**8), st.integers(1, 40)
    ),
    st.builds(Workload.from_numels, st.lists(st.integers(10**6, 10**8), min_size=1, max_size=30)),
)


@st.composite
def gpu_budgets(draw: st.DrawFn) -> Budgets:
    return Budgets(gpu_bytes=draw(st.one_of(st.none(), st.integers(0, 10**10))))


def budget_for(slots: int, numel: int, units: int = 0) -> Budgets:
    """Return a GPU budget for ``slots`` slots or residents of ``numel`` parameters, and gradients of ``units``."""
    gradient_bytes = cuda_bytes_of([Reservation(kind=MemoryKind.ACCELERATOR, each_bytes=2 * numel)])
    return Budgets(gpu_bytes=slots * resident_bytes_of(numel) + units * gradient_bytes)


def exposed_s(plan: UpdatePlan, model: CostModel, overlap: Windows) -> float:
    return overlap.exposed_s(simulate(plan.schedule, plan.workload, model, overlap), plan.workload, model)


def every_plan_that_fits(workload: Workload, budgets: Budgets) -> Iterator[UpdatePlan]:
    for placements in product(Placement, repeat=len(workload.units)):
        for num_slots in range(1, max(1, min(MAX_SLOTS, placements.count(Placement.STREAMED))) + 1):
            plan = UpdatePlan(workload=workload, placements=placements, num_slots=num_slots)
            if not budgets.missing(memory_of(plan)):
                yield plan


def least_exposed_s(workload: Workload, budgets: Budgets, model: CostModel, overlap: Windows) -> float:
    simulator = Simulator(model, overlap)
    return min(
        overlap.exposed_s(simulator.run(plan.schedule, workload), workload, model)
        for plan in every_plan_that_fits(workload, budgets)
    )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("overlap", [NO_WINDOWS, Windows(backward_s=0.05, forward_s=0.1)])
def test_with_seven_unequal_units_the_best_plan_is_a_fifth_better_at_most(seed: int, overlap: Windows) -> None:
    """Check a CPU and a link that are about equally fast, so that the choice of placements matters.

    The planner chooses shares, and cuts a model into many units: with seven, most choices have the same placements.
    """
    rng = random.Random(seed)
    workload = Workload.from_numels([rng.randrange(2 * 10**7, 10**8) for _ in range(7)])
    model = cost(cpu=1.5e9, h2d=25e9, d2h=26e9, both=42e9, dram=90e9, gpu=8e10, latency=1e-5)
    budgets = budget_for(2, 10**8)
    planned = plan_updates(workload, model, budgets, overlap)
    assert len(set(planned.plan.placements)) > 1
    assert planned.exposed_s <= 1.25 * least_exposed_s(workload, budgets, model, overlap)


@pytest.mark.promise("P5")
@given(workloads, costs, gpu_budgets(), windows)
def test_the_plan_is_no_worse_than_a_simple_rule_nor_better_than_the_bound(
    workload: Workload, model: CostModel, budgets: Budgets, overlap: Windows
) -> None:
    planned = plan_updates(workload, model, budgets, overlap)
    check(planned.plan.schedule, workload)
    # The time up to which the planner ignores differences.
    negligible_s = LITTLE * overlap.forward_s
    for rule in Placement:
        plan = UpdatePlan(workload=workload, placements=place_all(workload, rule), num_slots=1)
        if not budgets.missing(memory_of(plan)):
            assert planned.exposed_s <= exposed_s(plan, model, overlap) * (1 + 1e-9) + negligible_s + 1e-12
    assert planned.exposed_s == pytest.approx(exposed_s(planned.plan, model, overlap), rel=1e-9, abs=1e-12)
    bound_s = work_bound(workload, model, budgets.gpu_bytes).seconds
    assert planned.update_s >= bound_s * (1 - 1e-6)


@pytest.mark.promise("P5")
@given(workloads, costs, st.integers(0, 10**10), st.integers(0, 4 * 10**10), st.integers(0, 4 * 10**10))
def test_the_plan_fits_every_budget_or_the_error_names_those_that_are_exceeded(
    workload: Workload, model: CostModel, gpu_bytes: int, host_bytes: int, pinned_bytes: int
) -> None:
    budgets = Budgets(gpu_bytes=gpu_bytes, host_bytes=host_bytes, pinned_bytes=pinned_bytes)
    possible = [
        plan
        for rule in Placement
        if not budgets.missing(
            memory_of(plan := UpdatePlan(workload=workload, placements=place_all(workload, rule), num_slots=1))
        )
    ]
    try:
        planned = plan_updates(workload, model, budgets)
    except DoesNotFit as error:
        missing = error.missing
    else:
        assert planned.memory == memory_of(planned.plan)
        assert not budgets.missing(planned.memory)
        return
    assert not possible
    assert missing
    assert min(missing.values()) > 0


@given(workloads, costs, gpu_budgets(), windows)
@settings(max_examples=20)
def test_planning_is_deterministic(workload: Workload, model: CostModel, budgets: Budgets, overlap: Windows) -> None:
    first, again = (plan_updates(workload, model, budgets, overlap) for _ in range(2))
    assert first == again


def test_a_slow_cpu_streams_everything_and_a_slow_bus_nothing() -> None:
    workload, budgets = Workload.from_numels([10**8] * 20), budget_for(3, 10**8, 20)
    slow_cpu = plan_updates(workload, cost(cpu=1e7), budgets).plan
    assert slow_cpu.placements.count(Placement.CPU) == 0
    slow_bus = plan_updates(workload, cost(h2d=5e8, d2h=5e8), budgets).plan
    assert slow_bus.placements.count(Placement.STREAMED) == 0


def test_with_a_balanced_cpu_and_bus_the_plan_is_close_to_the_bound() -> None:
    """Check that each does about half of the work, except for the first and the last unit."""
    workload, model, budgets = Workload.from_numels([10**8] * 200), cost(d2h=16e9), budget_for(4, 10**8, 200)
    planned = plan_updates(workload, model, budgets)
    bound = work_bound(workload, model, budgets.gpu_bytes)
    assert bound.binding in (Resource.CPU, Resource.H2D)
    assert 80 <= planned.plan.placements.count(Placement.STREAMED) <= 110
    assert planned.update_s < 1.03 * bound.seconds


def test_free_memory_is_used_for_residents() -> None:
    workload, model = Workload.from_numels([10**8] * 20), cost()
    counts = [
        plan_updates(workload, model, budget_for(slots, 10**8)).plan.placements.count(Placement.RESIDENT)
        for slots in (0, 1, 6, 12, 20)
    ]
    assert counts == sorted(counts)
    assert counts[0] == 0
    assert counts[-1] > 12
    # The first units become residents, because forward needs them first.
    overlap = Windows(forward_s=0.2)
    placements = plan_updates(workload, model, budget_for(6, 10**8), overlap).plan.placements
    residents = placements.count(Placement.RESIDENT)
    assert placements[:residents] == (Placement.RESIDENT,) * residents


@pytest.mark.parametrize(
    ("model", "budgets"), [(cost(), NO_RESIDENTS), (cost().without_accelerator(), Budgets())], ids=["memory", "rate"]
)
def test_without_memory_or_a_rate_of_the_gpu_everything_is_updated_on_the_cpu(
    model: CostModel, budgets: Budgets
) -> None:
    workload = Workload.from_numels([10**7, 10**8] * 10)
    assert set(plan_updates(workload, model, budgets, Windows(forward_s=0.1)).plan.placements) == {Placement.CPU}


def test_slots_that_do_not_help_are_dropped() -> None:
    workload, model, budgets = Workload.from_numels([10**8] * 30), cost(cpu=1e7), budget_for(4, 10**8, 30)
    planned = plan_updates(workload, model, budgets)
    times = {
        slots: exposed_s(replace(planned.plan, num_slots=slots), model, NO_WINDOWS) for slots in range(1, MAX_SLOTS + 1)
    }
    assert planned.plan.num_slots == min(slots for slots, time_s in times.items() if time_s <= planned.exposed_s)
    assert planned.plan.num_slots < MAX_SLOTS


@pytest.mark.parametrize("overlap", [NO_WINDOWS, Windows(backward_s=0.5, forward_s=1.0)])
def test_a_thousand_units_are_planned_with_a_bounded_number_of_simulations(overlap: Windows) -> None:
    workload, budgets = Workload.from_numels([10**8] * 1000), budget_for(50, 10**8, 1000)
    planned = plan_updates(workload, cost(dram=90e9, both=22e9), budgets, overlap)
    assert 0 < planned.simulations <= MAX_SIMULATED_UNITS / 1000 + 2


def eager_plans(overlap: Windows, **rates: float) -> tuple[PlannedUpdate, PlannedUpdate]:
    """Return the plans of 20 equal units without memory for eager units, and with memory for 10 of them."""
    workload, without = Workload.from_numels([10**8] * 20), Budgets(gpu_bytes=0)
    budgets = (without, replace(without, eager_bytes=10 * 12 * 10**8))
    first, second = (plan_updates(workload, cost(**rates), budget, overlap) for budget in budgets)
    return first, second


def test_eager_units_shorten_the_iteration_as_far_as_their_memory_reaches() -> None:
    without, found = eager_plans(Windows(backward_s=2.0, forward_s=1.0))
    assert not without.plan.eager
    assert found.plan.eager == set(range(10, 20)), "those that backward completes first"
    assert found.memory.eager_bytes == 10 * 12 * 10**8
    # Forward waits for half of the update, from which half of the 2 s have moved to backward.
    assert without.exposed_s - found.exposed_s == pytest.approx(0.5, abs=0.01)
    assert found.added.slowed_s == pytest.approx(0.0)


@pytest.mark.parametrize(
    "overlap",
    [
        Windows(forward_s=1.0),
        Windows(backward_s=2.0, forward_s=1000.0),
        # Backward loses as much as forward would wait.
        Windows(backward_s=2.0, forward_s=1.0, slowdown=Slowdown(cpu=1.0)),
    ],
    ids=["no backward", "a forward that hides everything", "a slow backward"],
)
def test_no_unit_is_eager_if_that_gains_nothing(overlap: Windows) -> None:
    without, found = eager_plans(overlap)
    assert not found.plan.eager
    assert found.plan == without.plan


def test_with_eager_units_the_cpu_updates_more_units() -> None:
    workload, model, overlap = Workload.from_numels([10**8] * 20), cost(), Windows(backward_s=2.0, forward_s=0.5)
    gpu_bytes = budget_for(3, 10**8, 20).gpu_bytes
    budgets = (Budgets(gpu_bytes=gpu_bytes, eager_bytes=size) for size in (0, 20 * 12 * 10**8))
    without, found = (plan_updates(workload, model, budget, overlap) for budget in budgets)
    assert found.plan.placements.count(Placement.CPU) > without.plan.placements.count(Placement.CPU)
    assert found.added.total_s < 0.8 * without.added.total_s


def test_a_workload_without_units_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one unit, found none"):
        plan_updates(Workload.from_numels([]), cost())


def test_the_error_names_the_missing_gigabytes() -> None:
    workload = Workload.from_numels([10**8])
    with pytest.raises(DoesNotFit) as caught:
        plan_updates(workload, cost(), Budgets(gpu_bytes=0, host_bytes=10**9))
    # Every plan takes 16 bytes per parameter.
    assert caught.value.missing == {"host_bytes": 600_000_000}
    assert str(caught.value) == (
        "Nothing fits: the nearest plan exceeds host memory by 600 MB per rank.\nUse more ranks."
    )
