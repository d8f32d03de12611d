"""Check that other ranks restore a plan, and that plans follow the order of forward and the rules."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from perf_model.plan_request import PlanRequest
from perf_model.prediction.memory import Budgets, DoesNotFit
from perf_model.prediction.overlap_windows import Windows
from perf_model.schedule.cutting import BORDER_MULTIPLE
from perf_model.schedule.placement import Placement
from perf_model.schedule.rules import PlacementRule, PlacementRules
from perf_model.schedule.workload import Partition
from tests.model.costs import cost

LAYERS = [[Partition(f"layers.{layer}.weight", BORDER_MULTIPLE * (2_000_000 + layer)) for layer in range(12)]]

REQUEST = PlanRequest(
    sub_groups=LAYERS,
    unit_sizes=(LAYERS[0][-1].numel,),
    cost=cost(cpu=1.5e9, h2d=25e9, d2h=26e9, both=42e9, dram=90e9, gpu=8e10, latency=1e-5),
    budgets=Budgets(gpu_bytes=2 * 10**9),
    windows=Windows(backward_s=0.05, forward_s=0.05),
)


def test_another_rank_restores_the_plan_from_the_decisions() -> None:
    request = replace(REQUEST, uses=[f"layers.{layer}.weight" for layer in reversed(range(12))])
    chosen = request.plan()
    assert len(set(chosen.plan.placements)) > 1
    received = json.loads(json.dumps(chosen.to_json_dict()))
    assert replace(request, windows=Windows()).restore(received) == chosen.plan


def test_another_rank_restores_the_eager_units() -> None:
    request = replace(REQUEST, budgets=Budgets(gpu_bytes=0, eager_bytes=10**9))
    chosen = request.plan()
    assert chosen.plan.eager
    received = json.loads(json.dumps(chosen.to_json_dict()))
    assert replace(request, windows=Windows()).restore(received) == chosen.plan


def test_a_rank_with_other_sub_groups_refuses_the_decisions() -> None:
    other = [[*LAYERS[0][:-1], Partition("layers.11.weight", LAYERS[0][0].numel)]]
    with pytest.raises(ValueError, match="Use the same model and config on every rank"):
        replace(REQUEST, sub_groups=other).restore(REQUEST.plan().to_json_dict())


def test_units_are_used_in_the_order_of_their_parameters_and_unused_ones_last() -> None:
    request = replace(REQUEST, uses=["layers.5.weight", "layers.2.weight"])
    others = [index for index in range(12) if index not in (5, 2)]
    assert request.first_use_of(request.workload(*request.unit_sizes)) == (5, 2, *others)


def test_units_that_forward_uses_late_are_those_that_the_cpu_updates() -> None:
    def mean_place_on_cpu(request: PlanRequest) -> float:
        on_cpu = [index for index, placement in enumerate(request.plan().plan.placements) if placement is Placement.CPU]
        return sum(on_cpu) / len(on_cpu)

    # In a shorter forward, most of the update is exposed wherever the CPU's units are.
    request = replace(REQUEST, windows=Windows(backward_s=0.05, forward_s=0.15))
    backwards = replace(request, uses=[partition.name for partition in reversed(LAYERS[0])])
    assert mean_place_on_cpu(request) > 5.5 > mean_place_on_cpu(backwards)


def test_rules_place_their_parameters_in_the_plan() -> None:
    rules = PlacementRules((PlacementRule(("layers.3.*",), "streamed"), PlacementRule(("layers.0.*",), "cpu")))
    placements = replace(REQUEST, rules=rules).plan().plan.placements
    assert placements[3] is Placement.STREAMED
    assert placements[0] is Placement.CPU


def test_the_prediction_of_a_plan_depends_on_the_order_in_which_forward_uses_units() -> None:
    plan = REQUEST.plan().plan
    backwards = replace(REQUEST, uses=[partition.name for partition in reversed(LAYERS[0])])
    assert backwards.evaluate(plan).exposed_s > REQUEST.evaluate(plan).exposed_s


def test_gradients_accumulated_in_host_memory_leave_only_rules_on_the_accelerator() -> None:
    rules = PlacementRules((PlacementRule(("layers.3.*", "layers.7.*"), "streamed"),))
    with_sums = replace(REQUEST, rules=rules, setup=replace(REQUEST.setup, accumulates=True))
    without_sums = replace(with_sums, setup=replace(with_sums.setup, sums_on_accelerator=False))
    assert with_sums.fixed_bytes > without_sums.fixed_bytes
    exactly = replace(without_sums, budgets=Budgets(gpu_bytes=without_sums.fixed_bytes))
    sizes = (LAYERS[0][-1].numel, LAYERS[0][-1].numel // 8)
    for request in (exactly, replace(without_sums, unit_sizes=sizes)):
        chosen = request.plan()
        assert chosen.plan.numel(Placement.STREAMED) == LAYERS[0][3].numel + LAYERS[0][7].numel
        assert not request.budgets.missing(chosen.planned.memory)
    with pytest.raises(DoesNotFit):
        replace(without_sums, budgets=Budgets(gpu_bytes=without_sums.fixed_bytes - 1)).plan()
    small = replace(without_sums, unit_sizes=sizes)
    assert small.fixed_bytes < without_sums.fixed_bytes
    assert replace(small, budgets=Budgets(gpu_bytes=small.fixed_bytes)).plan().unit_size == sizes[1]
