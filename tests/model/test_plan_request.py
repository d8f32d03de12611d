"""Test requests for plans: the order in which forward uses parameters, and why nothing is streamed."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from perf_model.plan_request import PlanRequest
from perf_model.prediction.cost import CostModel
from perf_model.prediction.memory import Budgets, DoesNotFit, TrainingSetup
from perf_model.prediction.overlap_windows import Windows
from perf_model.schedule.cutting import BORDER_MULTIPLE, cut_into_units
from perf_model.schedule.placement import Placement
from perf_model.schedule.rules import PlacementRule, PlacementRules
from perf_model.schedule.uses import with_uses
from perf_model.schedule.workload import Partition, Workload
from perf_model.units import GB
from tests.model.costs import cost, plan_updates
from tests.model.profiles import RATES, profile

EMBEDDING, LAYER, HEAD = (Partition(name, 1600) for name in ("embedding.weight", "layers.0.weight", "head.weight"))
SUB_GROUPS = [[EMBEDDING, LAYER, HEAD]]
SECOND, BIAS = Partition("layers.1.weight", 3200), Partition("layers.0.bias", 16)


@pytest.mark.parametrize(
    ("sub_groups", "layers", "size", "expected"),
    [
        # Each parameter is used once, or a layer five times: it is needed in its first pass.
        (SUB_GROUPS, [LAYER], 1600, [1600, 1600, 1600]),
        (SUB_GROUPS, 5 * [LAYER], 1600, [1600, 5 * 1600, 1600]),
        # Pieces of a shared layer are all needed in its first pass.
        (SUB_GROUPS, 5 * [LAYER], 800, [1024, 576, 1024, 576 + 4 * 1600, 1024, 576]),
        # The first layer is followed by the second one, and the head by nothing.
        ([[EMBEDDING, LAYER, SECOND, HEAD]], 3 * [LAYER, SECOND], 3200, [3200, 3200 + 2 * 4800, 1600]),
        # A bias after the weight of each layer is the last parameter that forward uses for the first time.
        ([*SUB_GROUPS, [BIAS]], 5 * [LAYER, BIAS], 1600, [1600, 1600, 1600, 16 + 4 * 1616]),
    ],
)
def test_shared_parameters_are_needed_in_the_first_pass_and_the_next_ones_after_the_last(
    sub_groups: list[list[Partition]], layers: list[Partition], size: int, expected: list[int]
) -> None:
    uses = [partition.name for partition in (EMBEDDING, *layers, HEAD)]
    # Forward uses as many parameters from the need of each unit to the next unit's.
    assert [
        unit.forward_numel for unit in with_uses(cut_into_units(sub_groups, size), sub_groups, uses).units
    ] == expected


def test_the_plan_for_units_stored_in_another_order_equals_the_plan_of_the_arranged_workload() -> None:
    arranged, first_use = Workload.from_numels([10**7 * (3 + number) for number in range(6)]), (3, 1, 5, 0, 2, 4)
    units = {index: replace(arranged.units[place], index=index) for place, index in enumerate(first_use)}
    stored = Workload(tuple(units[index] for index in range(6)), first_use)
    overlap = Windows(backward_s=0.05, forward_s=0.05)
    model, budgets = cost(h2d=25e9, d2h=26e9, gpu=8e10), Budgets(gpu_bytes=1_500_000_000)
    expected = plan_updates(arranged, model, budgets, overlap)
    planned = plan_updates(stored, model, budgets, overlap)
    assert len(set(expected.plan.placements)) > 1
    assert [planned.plan.placements[index] for index in first_use] == list(expected.plan.placements)
    assert planned.exposed_s == pytest.approx(expected.exposed_s, rel=1e-12)


LAYERS = [[Partition(f"layers.{layer}.weight", BORDER_MULTIPLE * (2_000_000 + layer)) for layer in range(12)]]

REQUEST = PlanRequest(
    sub_groups=LAYERS,
    unit_sizes=(LAYERS[0][-1].numel,),
    cost=cost(cpu=1.5e9, h2d=25e9, d2h=26e9, both=42e9, dram=90e9, gpu=8e10, latency=1e-5),
    budgets=Budgets(gpu_bytes=2 * 10**9),
    windows=Windows(backward_s=0.05, forward_s=0.05),
)


@pytest.mark.parametrize(
    "request_of_one_rank",
    [
        replace(REQUEST, uses=[f"layers.{layer}.weight" for layer in reversed(range(12))]),
        replace(REQUEST, budgets=Budgets(gpu_bytes=0, eager_bytes=10**9)),
    ],
    ids=["several placements", "eager units"],
)
def test_another_rank_restores_the_plan_from_the_decisions(request_of_one_rank: PlanRequest) -> None:
    chosen = request_of_one_rank.plan()
    assert len(set(chosen.plan.placements)) > 1 or chosen.plan.eager
    received = json.loads(json.dumps(chosen.to_json_dict()))
    assert replace(request_of_one_rank, windows=Windows()).restore(received) == chosen.plan


def test_a_rank_with_other_sub_groups_refuses_the_decisions() -> None:
    other = [[*LAYERS[0][:-1], Partition("layers.11.weight", LAYERS[0][0].numel)]]
    with pytest.raises(ValueError, match="Use the same model and config on every rank"):
        replace(REQUEST, sub_groups=other).restore(REQUEST.plan().to_json_dict())


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
        assert not request.budgets.missing(chosen.memory)
    with pytest.raises(DoesNotFit):
        replace(without_sums, budgets=Budgets(gpu_bytes=without_sums.fixed_bytes - 1)).plan()
    small = replace(without_sums, unit_sizes=sizes)
    assert small.fixed_bytes < without_sums.fixed_bytes
    assert replace(small, budgets=Budgets(gpu_bytes=small.fixed_bytes)).plan().unit_size == sizes[1]


COST = CostModel.from_profile(profile())

OF_ONE_GROUP = PlanRequest(
    sub_groups=[[Partition(f"layers.{layer}.weight", 10**8) for layer in range(8)]],
    unit_sizes=(10**8,),
    cost=COST,
    budgets=Budgets(gpu_bytes=4 * 10**9),
    windows=Windows(),
)


def cost_with(**rates: float | None) -> CostModel:
    return CostModel.from_profile(profile({**RATES, **rates}))


SLOW_LINK = {"h2d_bytes_per_s": 1e9, "d2h_bytes_per_s": 1e9, "both_bytes_per_s": 1.8e9}
SLOW_LINK["both_beside_cpu_adam_bytes_per_s"] = 1.7e9
ALL_ON_CPU = PlacementRules.from_json([{"match": "*", "states": "cpu"}])


@pytest.mark.parametrize(
    ("change", "unavailable", "reason"),
    [
        ({}, "", ""),
        ({"cost": cost_with(**SLOW_LINK)}, "", "no plan that streams is predicted to expose less time."),
        ({"cost": cost_with(gpu_adam_params_per_s=None)}, "", "the hardware profile has no rate of Adam on the GPU"),
        ({"budgets": Budgets()}, "", "the states of all units fit into GPU memory, and stay there."),
        ({"rules": ALL_ON_CPU}, "", "rules give every unit another placement."),
        ({"budgets": Budgets(gpu_bytes=0)}, "Triton is missing.", "Triton is missing."),
    ],
)
def test_the_reason_why_nothing_is_streamed_is_given(change: dict[str, Any], unavailable: str, reason: str) -> None:
    request = replace(OF_ONE_GROUP, **change)
    plan = request.plan().plan
    assert (Placement.STREAMED in plan.placements) is (reason == "")
    found = request.why_nothing_is_streamed(plan, unavailable)
    assert found.startswith(f"Nothing is streamed: {reason}" if reason else "")
    assert bool(found) is bool(reason)


@pytest.mark.parametrize("setup", [TrainingSetup(), TrainingSetup(accumulates=True)])
def test_with_the_memory_that_the_reason_names_a_unit_can_be_streamed(setup: TrainingSetup) -> None:
    slow_cpu = cost_with(**dict.fromkeys(("cpu_adam_params_per_s", "cpu_adam_beside_transfers_params_per_s"), 1e7))
    request = replace(OF_ONE_GROUP, budgets=Budgets(gpu_bytes=10**9), setup=setup, cost=slow_cpu)
    why = request.why_nothing_is_streamed(request.plan().plan, "")
    assert "the budget of 1.0 GB of GPU memory cannot hold a slot and the gradients" in why
    named = re.search(r'"gpu_memory_gb" to at least (\d+\.\d)', why)
    assert named is not None
    enough = replace(request, budgets=Budgets(gpu_bytes=int(float(named[1]) * GB)))
    assert set(enough.plan().plan.placements) != {Placement.CPU}
