"""Test the reasons why nothing is streamed: each is given where it holds, and its remedy is true."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from perf_model.plan_request import PlanRequest
from perf_model.prediction.cost import CostModel
from perf_model.prediction.memory import Budgets, TrainingSetup
from perf_model.prediction.overlap_windows import Windows
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.rules import PlacementRules
from perf_model.schedule.workload import Partition
from perf_model.units import GB
from tests.model.profiles import RATES, profile

COST = CostModel.from_profile(profile())
REQUEST = PlanRequest(
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
    plan, why = plan_and_reason(REQUEST)
    assert Placement.STREAMED in plan.placements
    assert why == ""


@pytest.mark.parametrize("setup", [TrainingSetup(), TrainingSetup(accumulates=True)])
def test_with_the_memory_that_the_reason_names_a_unit_can_be_streamed(setup: TrainingSetup) -> None:
    request = replace(REQUEST, budgets=Budgets(gpu_bytes=10**9), setup=setup, cost=slow_cpu())
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
    _, why = plan_and_reason(replace(REQUEST, cost=CostModel.from_profile(profile(slow))))
    assert why == "Nothing is streamed: no plan that streams is predicted to expose less time."


def test_without_a_rate_of_adam_on_the_gpu_the_reason_is_the_profile() -> None:
    no_rate = CostModel.from_profile(profile({**RATES, "gpu_adam_params_per_s": None}))
    assert "the hardware profile has no rate of Adam on the GPU" in plan_and_reason(replace(REQUEST, cost=no_rate))[1]


def test_states_that_all_fit_are_not_streamed() -> None:
    plan, why = plan_and_reason(replace(REQUEST, budgets=Budgets()))
    assert set(plan.placements) == {Placement.RESIDENT}
    assert why == "Nothing is streamed: the states of all units fit into GPU memory, and stay there."


def test_rules_are_the_reason_where_they_place_every_unit() -> None:
    rules = PlacementRules.from_json([{"match": "*", "states": "cpu"}])
    _, why = plan_and_reason(replace(REQUEST, rules=rules))
    assert why == "Nothing is streamed: rules give every unit another placement."


def test_an_accelerator_that_cannot_update_is_the_reason_before_any_other() -> None:
    _, why = plan_and_reason(replace(REQUEST, budgets=Budgets(gpu_bytes=0)), unavailable="Triton is missing.")
    assert why == "Nothing is streamed: Triton is missing."
