"""Test when forward needs the units of parameters that it uses several times, as those of shared layers."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from perf_model.plan_request import PlanRequest
from perf_model.prediction.memory import Budgets
from perf_model.prediction.overlap_windows import Windows
from perf_model.prediction.simulate import simulate
from perf_model.schedule.action import ActionKind
from perf_model.schedule.cutting import cut_into_units
from perf_model.schedule.lowering import forward_order
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import place_all
from perf_model.schedule.uses import ParameterUses
from perf_model.schedule.workload import Partition
from tests.model.costs import cost

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
