"""Test plans for a forward that uses units in another order than that of their indices."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perf_model.planner import evaluate, in_forward_order, plan_units
from perf_model.prediction.cost import CostModel
from perf_model.prediction.memory import DEFAULT_SETUP, Budgets
from perf_model.prediction.overlap_windows import Windows
from perf_model.prediction.timeline import Phase, seconds_of
from perf_model.schedule.check import check
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Workload
from tests.model.costs import cost, costs, windows
from tests.model.planned import plan_updates
from tests.model.strategies import plans


@st.composite
def orders(draw: st.DrawFn, count: int) -> tuple[int, ...]:
    return tuple(draw(st.permutations(range(count))))


def stored_in_another_order(workload: Workload, first_use: tuple[int, ...]) -> Workload:
    """Return the workload whose units are those of ``workload`` in the order ``first_use``."""
    units = [workload.units[0]] * len(first_use)
    for position, index in enumerate(first_use):
        units[index] = replace(workload.units[position], index=index)
    return Workload(tuple(units))


@given(plans(10**8), costs, windows, st.data())
def test_a_plan_for_units_stored_in_another_order_exposes_as_much(
    plan: UpdatePlan, model: CostModel, overlap: Windows, data: st.DataObject
) -> None:
    plan, first_use = replace(plan, order=None), data.draw(orders(len(plan.placements)))
    stored = stored_in_another_order(plan.workload, first_use)
    placement_of = dict(zip(first_use, plan.placements, strict=True))
    placements = tuple(placement_of[unit.index] for unit in stored.units)
    mapped = in_forward_order(UpdatePlan(workload=stored, placements=placements, num_slots=plan.num_slots), first_use)
    expected = evaluate(plan, model, overlap, DEFAULT_SETUP)
    other = replace(overlap, first_use=first_use)
    found = evaluate(mapped, model, other, DEFAULT_SETUP)
    assert found.exposed_s == pytest.approx(expected.exposed_s, rel=1e-12, abs=1e-15)
    assert found.update_s == pytest.approx(expected.update_s, rel=1e-12, abs=1e-15)
    exposed_s = seconds_of(Phase.EXPOSED, other.phases(found.timeline, stored, model))
    assert exposed_s == pytest.approx(expected.exposed_s, rel=1e-9, abs=1e-12)
    # The allocator's segments are filled in the order of the units, so GPU memory may differ.
    assert found.memory.host_bytes == expected.memory.host_bytes


@settings(max_examples=20)
@given(
    st.lists(st.integers(10**6, 10**8), min_size=1, max_size=16),
    costs,
    st.builds(Windows, backward_s=st.floats(0, 1), forward_s=st.floats(0, 1)),
    st.integers(0, 10**10),
    st.data(),
)
def test_the_plan_is_that_of_the_arranged_workload(
    numels: list[int], model: CostModel, overlap: Windows, gpu_bytes: int, data: st.DataObject
) -> None:
    arranged, budgets = Workload.from_numels(numels), Budgets(gpu_bytes=gpu_bytes)
    first_use = data.draw(orders(len(numels)))
    expected = plan_updates(arranged, model, budgets, overlap)
    stored = stored_in_another_order(arranged, first_use)
    planned = plan_updates(stored, model, budgets, replace(overlap, first_use=first_use))
    check(planned.plan.schedule, stored)
    assert planned.exposed_s == pytest.approx(expected.exposed_s, rel=1e-12, abs=1e-15)
    assert [planned.plan.placements[index] for index in first_use] == list(expected.plan.placements)


def test_residents_are_the_units_that_forward_uses_first() -> None:
    """Check a model whose last unit is the embedding, so that forward begins with it."""
    workload, last_first = Workload.from_numels([10**8] * 20), (19, *range(19))
    overlap = Windows(forward_s=0.2, first_use=last_first)
    plan = plan_updates(workload, cost(), Budgets(gpu_bytes=8 * 14 * 10**8), overlap).plan
    residents = plan.placements.count(Placement.RESIDENT)
    assert 0 < residents < 20
    assert {plan.placements[index] for index in last_first[:residents]} == {Placement.RESIDENT}


def test_every_unit_size_is_planned_in_the_order_in_which_forward_uses_its_units() -> None:
    def workload_of(size: int) -> Workload:
        return Workload.from_numels([size] * (2 * 10**9 // size))

    def reverse(workload: Workload) -> tuple[int, ...]:
        return tuple(reversed(range(len(workload.units))))

    sizes, budgets, overlap = (10**8, 5 * 10**7), Budgets(gpu_bytes=6 * 10**9), Windows(backward_s=0.1, forward_s=0.2)
    size, planned = plan_units(workload_of, sizes, cost(), budgets, overlap, DEFAULT_SETUP)
    same_size, backwards = plan_units(workload_of, sizes, cost(), budgets, overlap, DEFAULT_SETUP, reverse)
    assert same_size == size
    assert backwards.plan.placements == planned.plan.placements[::-1]
    assert backwards.exposed_s == pytest.approx(planned.exposed_s)
    assert backwards.plan.order is not None


def test_an_order_that_leaves_out_a_unit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"names each of its 3 units once, found \(0, 2\)"):
        plan_updates(Workload.from_numels([1, 1, 1]), cost(), windows=Windows(forward_s=1.0, first_use=(0, 2)))
