"""Test plans of workloads in which rules fix the placement of some units: the planner decides only the others."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perf_model.planner import LITTLE, plan_units
from perf_model.prediction.cost import CostModel
from perf_model.prediction.memory import DEFAULT_SETUP, Budgets, DoesNotFit, TrainingSetup, memory_of
from perf_model.prediction.overlap_windows import Windows
from perf_model.prediction.simulate import Simulator
from perf_model.schedule.check import check
from perf_model.schedule.happens_before import CHAINS
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Range, Unit, Workload
from tests.model.costs import cost, costs
from tests.model.planned import plan_updates

CPU, STREAMED, RESIDENT = Placement.CPU, Placement.STREAMED, Placement.RESIDENT

overlaps = st.one_of(st.just(Windows()), st.builds(Windows, backward_s=st.floats(0, 1), forward_s=st.floats(0.01, 1)))
setups = st.builds(TrainingSetup, accumulates=st.booleans())


def workload_with(units: list[tuple[int, Placement | None]]) -> Workload:
    return Workload(
        tuple(Unit(index, (Range(index, 0, numel),), fixed=fixed) for index, (numel, fixed) in enumerate(units))
    )


def partly_fixed(max_units: int) -> st.SearchStrategy[Workload]:
    placement = st.one_of(st.none(), st.sampled_from(Placement))
    unit = st.tuples(st.integers(10**6, 10**8), placement)
    return st.lists(unit, min_size=1, max_size=max_units).map(workload_with)


@given(partly_fixed(20), costs, overlaps, setups, st.one_of(st.none(), st.integers(0, 10**10)))
def test_no_fixed_placement_is_changed_and_the_plan_is_no_worse_than_the_cpu(
    workload: Workload, model: CostModel, overlap: Windows, setup: TrainingSetup, gpu_bytes: int | None
) -> None:
    budgets = Budgets(gpu_bytes=gpu_bytes)
    least = tuple(unit.fixed or CPU for unit in workload.units)
    least_plan = UpdatePlan(workload=workload, placements=least, num_slots=1)
    missing = budgets.missing(memory_of(least_plan, setup))
    if missing:
        with pytest.raises(DoesNotFit) as caught:
            plan_updates(workload, model, budgets, overlap, setup)
        assert caught.value.missing == missing
        return
    planned = plan_updates(workload, model, budgets, overlap, setup)
    check(planned.plan.schedule, workload)
    for unit, placement in zip(workload.units, planned.plan.placements, strict=True):
        assert unit.fixed in (None, placement)
    assert not budgets.missing(planned.memory)
    simulator = Simulator(model, overlap)
    least_s = overlap.exposed_s(simulator.run(least_plan.schedule, workload), workload, model)
    assert planned.exposed_s <= least_s * (1 + 1e-9) + LITTLE * overlap.forward_s + 1e-12


@pytest.mark.parametrize("seed", range(4))
def test_a_search_in_windows_of_forward_never_changes_a_fixed_placement(seed: int) -> None:
    """Check a machine and a budget with which free units have all three placements, and many are simulated."""
    rng = random.Random(seed)
    workload = workload_with([(10**8, rng.choice((None, None, *Placement))) for _ in range(40)])
    overlap, budgets = Windows(backward_s=0.1, forward_s=0.2), Budgets(gpu_bytes=25 * 14 * 10**8)
    planned = plan_updates(workload, cost(), budgets, overlap)
    assert planned.simulations > 10
    assert set(planned.plan.placements) == set(Placement)
    placed = zip(workload.units, planned.plan.placements, strict=True)
    assert all(unit.fixed in (None, placement) for unit, placement in placed)


@pytest.mark.parametrize("overlap", [Windows(), Windows(backward_s=0.1, forward_s=0.3)])
def test_free_units_are_planned_around_the_fixed_ones(overlap: Windows) -> None:
    """Check that fixed residents take memory from others, and that free units are still streamed or resident."""
    numel = 10**8
    fixed: list[tuple[int, Placement | None]] = [(numel, None)] * 30
    fixed[20:26] = [(numel, RESIDENT)] * 6
    fixed[:4] = [(numel, CPU)] * 4
    workload, budgets = workload_with(fixed), Budgets(gpu_bytes=12 * 14 * numel)
    planned = plan_updates(workload, cost(cpu=1e8), budgets, overlap)
    placements = planned.plan.placements
    assert placements[20:26] == (RESIDENT,) * 6
    assert placements[:4] == (CPU,) * 4
    assert placements.count(STREAMED) > 0
    free = plan_updates(workload_with([(numel, None)] * 30), cost(cpu=1e8), budgets, overlap)
    assert free.exposed_s <= 1.001 * planned.exposed_s


def test_the_error_names_the_memory_that_fixed_units_miss_and_the_remedy() -> None:
    workload = workload_with([(10**8, RESIDENT), (10**8, STREAMED), (10**8, None)])
    with pytest.raises(DoesNotFit) as caught:
        plan_updates(workload, cost(), Budgets(gpu_bytes=10**9))
    assert set(caught.value.missing) == {"gpu_bytes"}
    assert str(caught.value).endswith("Let fewer units be resident or streamed, or use more ranks.")


def test_a_size_with_which_fixed_units_do_not_fit_is_not_chosen() -> None:
    """Check streamed units, whose slot is as long as the longest of them."""

    def workload_of(size: int) -> Workload:
        return workload_with([(size, STREAMED)] * (10**9 // size))

    budgets = Budgets(gpu_bytes=4 * 10**9)
    sizes = (5 * 10**8, 10**8, 5 * 10**7)
    size, planned = plan_units(workload_of, sizes, cost(), budgets, Windows(), DEFAULT_SETUP)
    assert size < 5 * 10**8
    assert set(planned.plan.placements) == {STREAMED}
    with pytest.raises(DoesNotFit):
        plan_units(workload_of, sizes[:1], cost(), budgets, Windows(), DEFAULT_SETUP)


def test_a_placement_that_the_machine_cannot_have_is_refused() -> None:
    on_cpu = {kind: cost().per_param[kind] for kind in CHAINS[CPU]}
    with pytest.raises(ValueError, match="resident needs a rate of Adam on the accelerator"):
        plan_updates(workload_with([(10**8, RESIDENT)]), replace(cost(), per_param=on_cpu))
