"""Test plans by the order in which forward uses parameters, once each or several times where layers share them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perf_model.plan_request import PlanRequest
from perf_model.planner import evaluate, in_forward_order, plan_units
from perf_model.prediction.cost import CostModel
from perf_model.prediction.memory import DEFAULT_SETUP, Budgets
from perf_model.prediction.overlap_windows import Windows
from perf_model.prediction.simulate import simulate
from perf_model.prediction.timeline import Phase, seconds_of
from perf_model.schedule.action import ActionKind
from perf_model.schedule.check import check
from perf_model.schedule.cutting import cut_into_units
from perf_model.schedule.lowering import forward_order
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan, place_all
from perf_model.schedule.uses import ParameterUses
from perf_model.schedule.workload import Partition, Workload
from tests.model.costs import cost, costs, windows
from tests.model.planned import plan_updates
from tests.model.strategies import plans

EMBEDDING, LAYER, HEAD = (Partition(name, 1600) for name in ("embedding.weight", "layers.0.weight", "head.weight"))


SUB_GROUPS = [[EMBEDDING, LAYER, HEAD]]


def uses_of_shared(layers: int) -> list[str]:
    """Return the uses of a model with ``layers`` layers that share their parameters."""
    return [EMBEDDING.name, *[LAYER.name] * layers, HEAD.name]


def test_shared_parameters_are_needed_in_the_first_pass_and_the_next_ones_after_the_last() -> None:
    units = cut_into_units(SUB_GROUPS, 1600)
    counted = ParameterUses(SUB_GROUPS, uses_of_shared(5)).count(units)
    assert [unit.forward_numel for unit in counted.units] == [1600, 5 * 1600, 1600]
    # Pieces of a shared layer are all needed in its first pass.
    pieces = ParameterUses(SUB_GROUPS, uses_of_shared(5)).count(cut_into_units(SUB_GROUPS, 800))
    assert [unit.numel for unit in pieces.units] == [1024, 576] * 3
    assert [unit.forward_numel for unit in pieces.units] == [1024, 576, 1024, 576 + 4 * 1600, 1024, 576]


def test_layers_that_share_in_turns_are_needed_one_after_the_other() -> None:
    second = Partition("layers.1.weight", 3200)
    sub_groups = [[EMBEDDING, LAYER, second, HEAD]]
    uses = [EMBEDDING.name, *[LAYER.name, second.name] * 3, HEAD.name]
    counted = ParameterUses(sub_groups, uses).count(cut_into_units(sub_groups, 3200))
    # The first layer is followed by the second one, and the head by nothing.
    assert [unit.label for unit in counted.units] == ["embedding to layers.0", "layers.1", "head"]
    assert [unit.forward_numel for unit in counted.units] == [3200, 3200 + 2 * 4800, 1600]


def test_biases_in_a_sub_group_of_their_own_do_not_delay_the_need_of_their_layer() -> None:
    """Use a bias after the weight of each layer: it is the last parameter that forward uses for the first time."""
    bias = Partition("layers.0.bias", 16)
    sub_groups = [*SUB_GROUPS, [bias]]
    uses = [EMBEDDING.name, *[LAYER.name, bias.name] * 5, HEAD.name]
    counted = ParameterUses(sub_groups, uses).count(cut_into_units(sub_groups, 1600))
    assert [unit.forward_numel for unit in counted.units] == [1600, 1600, 1600, 16 + 4 * 1616]


def test_a_model_that_uses_each_parameter_once_has_the_units_that_it_had() -> None:
    units = cut_into_units(SUB_GROUPS, 1600)
    assert ParameterUses(SUB_GROUPS, uses_of_shared(1)).count(units) is units


@given(st.data())
def test_units_share_the_uses_of_all_parameters_that_are_in_them(data: st.DataObject) -> None:
    numels = data.draw(st.lists(st.integers(1, 5000), min_size=1, max_size=8))
    partitions = [Partition(f"layers.{index}.weight", numel) for index, numel in enumerate(numels)]
    names = st.sampled_from([*(partition.name for partition in partitions), "frozen.weight"])
    uses = data.draw(st.lists(names, max_size=20))
    parameter_uses = ParameterUses([partitions], uses)
    workload = cut_into_units([partitions], data.draw(st.integers(1, 3000)))
    counted = parameter_uses.count(workload)
    assert all(unit.forward_numel >= 0 for unit in counted.units)
    known = [partition.numel for name in uses for partition in partitions if partition.name == name]
    if len(set(uses) - {"frozen.weight"}) < len(known):
        assert counted.forward_numel == sum(known)
    assert [unit.ranges for unit in counted.units] == [unit.ranges for unit in workload.units]
    used = parameter_uses.first_use(workload)
    assert sorted(used) == list(range(len(workload.units)))


def test_shared_layers_expose_more_of_an_update_than_as_many_layers_of_their_own() -> None:
    """Compare two models of as many parameters, in which forward takes as long."""
    numel = 2 * 10**7
    partitions = [Partition(f"layers.{layer}.weight", numel) for layer in range(8)]
    own = PlanRequest(
        sub_groups=[partitions],
        unit_sizes=(numel,),
        cost=cost(cpu=1e9, h2d=25e9, d2h=25e9, both=40e9, dram=90e9, gpu=8e10),
        budgets=Budgets(gpu_bytes=10**9),
        windows=Windows(forward_s=0.5),
        uses=[partition.name for partition in partitions],
    )
    # The 8 layers are used 6 times in turns, so the last of them is needed after a sixth of forward.
    shared = replace(own, uses=6 * [partition.name for partition in partitions])
    plan = own.plan().plan
    # All of the next pass comes after the first use of the last layer.
    assert [unit.forward_numel for unit in shared.workload(numel).units] == [numel] * 7 + [41 * numel]
    assert shared.evaluate(plan).exposed_s > own.evaluate(plan).exposed_s
    found = shared.plan()
    assert found.planned.exposed_s <= shared.evaluate(plan).exposed_s
    timeline = simulate(found.plan.schedule, found.plan.workload, shared.cost, shared.windows)
    makes_ready = (ActionKind.GPU_STEP, ActionKind.PUBLISH)
    ready_s = {span.action.unit: span.end_s for span in timeline.spans if span.action.kind in makes_ready}
    # Unit i is needed after i of 48 layers.
    assert found.planned.exposed_s >= max(ready_s[unit] - 0.5 * unit / 48 for unit in range(8)) - 1e-9


def test_step_waits_for_the_persistent_unit_before_forward_uses_anything() -> None:
    partitions = [Partition("embedding", 1000), Partition("norm", 100, is_persistent=True), Partition("head", 500)]
    workload = cut_into_units([partitions], 10**6)
    used = ParameterUses([partitions], ["embedding", "norm", "embedding", "head"])
    assert workload.units[0].label == "persistent parameters"
    assert used.first_use(workload)[0] == 0
    assert [unit.forward_numel for unit in used.count(workload).units] == [0, 2600]
    placements = place_all(workload, Placement.CPU)
    assert forward_order(workload, placements, first_use=(1, 0)) == (0, 1)


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
