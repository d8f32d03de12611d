"""Test the planner: no better plan is found by slow searches or rules, budgets and rules are kept, and it is quick."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import perf_model.planner
from perf_model.planner import LITTLE, UNIT_SIZES, PlannedUpdate, plan_units
from perf_model.prediction.cost import CostModel
from perf_model.prediction.memory import DEFAULT_SETUP, MIB, Budgets, DoesNotFit, TrainingSetup, memory_of
from perf_model.prediction.overlap_windows import Windows
from perf_model.prediction.simulate import simulate
from perf_model.prediction.slowdown import Slowdown
from perf_model.prediction.work_bound import work_bound
from perf_model.schedule.check import check
from perf_model.schedule.happens_before import CHAINS
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Range, Unit, Workload
from tests.model.costs import cost, costs, plan_updates

CPU, STREAMED, RESIDENT = Placement.CPU, Placement.STREAMED, Placement.RESIDENT
NO_WINDOWS = Windows()
BALANCED = cost(cpu=1.5e9, h2d=25e9, d2h=26e9, both=42e9, dram=90e9, gpu=8e10, latency=1e-5)
"""A CPU and a link that are about equally fast, so that the choice of placements matters."""

OVERLAPS = st.one_of(st.just(NO_WINDOWS), st.builds(Windows, backward_s=st.floats(0, 1), forward_s=st.floats(0.01, 1)))
SETUPS = st.builds(TrainingSetup, accumulates=st.booleans())


def budget_for(slots: int, numel: int) -> Budgets:
    # The allocator rounds p, m and v up to 2 MiB each.
    return Budgets(gpu_bytes=slots * (12 * numel + 6 * MIB))


def exposed_s(plan: UpdatePlan, model: CostModel, overlap: Windows) -> float:
    timeline = simulate(plan.schedule, plan.workload, model, overlap)
    return overlap.added_time(timeline, plan.workload, model).exposed_s


def workload_with(units: Iterable[tuple[int, Placement | None]]) -> Workload:
    return Workload(
        tuple(Unit(index, (Range(index, 0, numel),), fixed=fixed) for index, (numel, fixed) in enumerate(units))
    )


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Draw up to 30 units, equal ones or not, of which rules may place some."""
    count, numels = draw(st.integers(1, 30)), st.integers(10**6, 10**8)
    same = [draw(numels)] * count
    lengths = same if draw(st.booleans()) else draw(st.lists(numels, min_size=count, max_size=count))
    fixed = st.sampled_from([None, None, *Placement]) if draw(st.booleans()) else st.none()
    return workload_with((numel, draw(fixed)) for numel in lengths)


@pytest.mark.P5
@given(workloads(), costs, OVERLAPS, SETUPS, st.none() | st.integers(0, 10**10), st.none() | st.integers(0, 4 * 10**10))
def test_a_plan_fits_keeps_fixed_placements_and_is_no_worse_than_a_rule_nor_better_than_the_bound(
    workload: Workload,
    model: CostModel,
    overlap: Windows,
    setup: TrainingSetup,
    gpu_bytes: int | None,
    host_bytes: int | None,
) -> None:
    budgets, rules = Budgets(gpu_bytes=gpu_bytes, host_bytes=host_bytes, pinned_bytes=host_bytes), []
    for rule in Placement:
        placements = tuple(unit.fixed or rule for unit in workload.units)
        plan = UpdatePlan(workload=workload, placements=placements, num_slots=1)
        if not budgets.missing(memory_of(plan, setup)):
            rules.append(plan)
    try:
        planned = plan_updates(workload, model, budgets, overlap, setup)
    except DoesNotFit:
        assert not rules
        return
    check(planned.plan.schedule, workload)
    placed = zip(workload.units, planned.plan.placements, strict=True)
    assert all(unit.fixed in (None, placement) for unit, placement in placed)
    assert planned.memory == memory_of(planned.plan, setup)
    assert not budgets.missing(planned.memory)
    # The time up to which the planner ignores differences.
    negligible_s = LITTLE * overlap.forward_s + 1e-12
    for plan in rules:
        assert planned.exposed_s <= exposed_s(plan, model, overlap) * (1 + 1e-9) + negligible_s
    assert planned.exposed_s == pytest.approx(exposed_s(planned.plan, model, overlap), rel=1e-9, abs=1e-12)
    assert planned.update_s >= work_bound(workload, model, gpu_bytes, setup).seconds * (1 - 1e-6)
    assert plan_updates(workload, model, budgets, overlap, setup) == planned, "planning is deterministic"


def test_free_memory_is_used_for_residents_which_are_the_first_units() -> None:
    workload, overlap, counts = Workload.from_numels([10**8] * 20), Windows(forward_s=0.2), []
    for slots in (0, 1, 6, 12, 20):
        placements = plan_updates(workload, cost(), budget_for(slots, 10**8), overlap).plan.placements
        counts.append(placements.count(RESIDENT))
        assert placements[: counts[-1]] == (RESIDENT,) * counts[-1]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1] > 12) == (0, True)


def test_a_thousand_units_are_planned_with_a_bounded_number_of_simulations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perf_model.planner, "MAX_SIMULATED_UNITS", 4_000)
    overlap = Windows(backward_s=0.5, forward_s=1.0)
    workload, budgets = Workload.from_numels([10**8] * 1000), budget_for(220, 10**8)
    planned = plan_updates(workload, cost(dram=90e9, both=22e9), budgets, overlap)
    assert 0 < planned.simulations <= 4_000 / 1000 + 2


def test_a_model_that_cpu_updates_slow_down_gets_a_plan_with_fewer_of_them() -> None:
    workload, windows = Workload.from_numels([10**8] * 20), Windows(backward_s=0.5, forward_s=0.5)
    on_cpu = [
        plan_updates(workload, BALANCED, Budgets(gpu_bytes=8 * 10**9), replace(windows, slowdown=slowdown)).plan.numel(
            CPU
        )
        for slowdown in (Slowdown(), Slowdown(copies=0.5), Slowdown(cpu=0.5))
    ]
    assert on_cpu[1] >= on_cpu[0] > on_cpu[2]


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


def test_the_error_names_the_missing_memory_and_the_remedy() -> None:
    # Every plan takes 16 bytes per parameter.
    with pytest.raises(DoesNotFit, match=r"by 600 MB per rank\.\nUse more ranks\.") as caught:
        plan_updates(workload_with([(10**8, None)]), cost(), Budgets(gpu_bytes=0, host_bytes=10**9))
    assert set(caught.value.missing) == {"host_bytes"}
    with pytest.raises(DoesNotFit, match="\nLet fewer units be resident, or use more ranks") as caught:
        plan_updates(workload_with([(10**8, RESIDENT)]), cost(), Budgets(gpu_bytes=10**9))
    assert set(caught.value.missing) == {"gpu_bytes"}


def test_a_workload_without_units_and_a_placement_that_the_machine_cannot_have_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one unit, found none"):
        plan_updates(Workload.from_numels([]), cost())
    on_cpu = {kind: cost().per_param[kind] for kind in CHAINS[CPU]}
    with pytest.raises(ValueError, match="resident needs a rate of Adam on the accelerator"):
        plan_updates(workload_with([(10**8, RESIDENT)]), replace(cost(), per_param=on_cpu))


@pytest.mark.parametrize(
    ("forward_s", "size"), [(5.0, 5_000_000), (10.0, 7_000_000), (100.0, 70_000_000), (10_000.0, 1_000_000_000)]
)
def test_units_are_the_largest_with_which_almost_nothing_is_exposed(forward_s: float, size: int) -> None:
    """Check a forward that hides all but the first unit, which the CPU updates. A thousandth of it is negligible."""
    planned = plan_on_the_cpu(forward_s)
    assert (planned.unit_size, planned.exposed_s) == (size, pytest.approx(size / 1e9 + 2 * size / 12e9))


def test_the_limit_of_simulations_ends_the_descent_but_not_larger_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perf_model.planner, "MAX_SIMULATED_UNITS", 1)
    # Units smaller than in the grid are not tried any more.
    assert [plan_on_the_cpu(forward_s).unit_size for forward_s in (5.0, 100.0)] == [10_000_000, 70_000_000]


def plan_on_the_cpu(forward_s: float) -> PlannedUpdate:
    return plan_units(
        lambda size: Workload.from_numels([size] * (2 * 10**9 // size)),
        UNIT_SIZES,
        cost(),
        Budgets(gpu_bytes=0),
        Windows(forward_s=forward_s),
        DEFAULT_SETUP,
    )
