"""Test requests for plans: restored from decisions, and explained where nothing is streamed."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from perf_model.plan_request import PlanRequest
from perf_model.prediction.cost import CostModel
from perf_model.prediction.memory import Budgets, DoesNotFit, TrainingSetup
from perf_model.prediction.overlap_windows import Windows
from perf_model.schedule.cutting import BORDER_MULTIPLE
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.rules import PlacementRule, PlacementRules
from perf_model.schedule.workload import Partition
from perf_model.units import GB
from tests.model.costs import cost
from tests.model.profiles import RATES, profile

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


COST = CostModel.from_profile(profile())


OF_ONE_GROUP = PlanRequest(
    sub_groups=[[Partition(f"layers.{layer}.weight", 10**8) for layer in range(8)]],
    unit_sizes=(10**8,),
    cost=COST,
    budgets=Budgets(gpu_bytes=4 * 10**9),
    windows=Windows(),
)


def plan_and_reason(request: PlanRequest, unavailable: str = "") -> tuple[UpdatePlan, str]:
    plan = request.plan().plan
    return plan, request.why_nothing_is_streamed(plan, unavailable)


def test_a_plan_that_streams_has_no_reason() -> None:
    plan, why = plan_and_reason(OF_ONE_GROUP)
    assert Placement.STREAMED in plan.placements
    assert why == ""


@pytest.mark.parametrize("setup", [TrainingSetup(), TrainingSetup(accumulates=True)])
def test_with_the_memory_that_the_reason_names_a_unit_can_be_streamed(setup: TrainingSetup) -> None:
    request = replace(OF_ONE_GROUP, budgets=Budgets(gpu_bytes=10**9), setup=setup, cost=slow_cpu())
    _, why = plan_and_reason(request)
    assert "the budget of 1.0 GB of GPU memory cannot hold a slot and the gradients" in why
    assert "or use more ranks" in why
    named = re.search(r'"gpu_memory_gb" to at least (\d+\.\d)', why)
    assert named is not None
    plan, _ = plan_and_reason(replace(request, budgets=Budgets(gpu_bytes=int(float(named[1]) * GB))))
    assert set(plan.placements) != {Placement.CPU}


def slow_cpu() -> CostModel:
    slow = {"cpu_adam_params_per_s": 1e7, "cpu_adam_beside_transfers_params_per_s": 1e7}
    return CostModel.from_profile(profile({**RATES, **slow}))


def test_with_a_slow_link_the_reason_is_the_prediction() -> None:
    slow = {**RATES, "h2d_bytes_per_s": 1e9, "d2h_bytes_per_s": 1e9, "both_bytes_per_s": 1.8e9}
    slow["both_beside_cpu_adam_bytes_per_s"] = 1.7e9
    _, why = plan_and_reason(replace(OF_ONE_GROUP, cost=CostModel.from_profile(profile(slow))))
    assert why == "Nothing is streamed: no plan that streams is predicted to expose less time."


def test_without_a_rate_of_adam_on_the_gpu_the_reason_is_the_profile() -> None:
    no_rate = CostModel.from_profile(profile({**RATES, "gpu_adam_params_per_s": None}))
    assert (
        "the hardware profile has no rate of Adam on the GPU" in plan_and_reason(replace(OF_ONE_GROUP, cost=no_rate))[1]
    )


def test_states_that_all_fit_are_not_streamed() -> None:
    plan, why = plan_and_reason(replace(OF_ONE_GROUP, budgets=Budgets()))
    assert set(plan.placements) == {Placement.RESIDENT}
    assert why == "Nothing is streamed: the states of all units fit into GPU memory, and stay there."


def test_rules_are_the_reason_where_they_place_every_unit() -> None:
    rules = PlacementRules.from_json([{"match": "*", "states": "cpu"}])
    _, why = plan_and_reason(replace(OF_ONE_GROUP, rules=rules))
    assert why == "Nothing is streamed: rules give every unit another placement."


def test_an_accelerator_that_cannot_update_is_the_reason_before_any_other() -> None:
    _, why = plan_and_reason(replace(OF_ONE_GROUP, budgets=Budgets(gpu_bytes=0)), unavailable="Triton is missing.")
    assert why == "Nothing is streamed: Triton is missing."
