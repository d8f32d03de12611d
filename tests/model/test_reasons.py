"""Test the reasons why nothing is streamed: each is given where it holds, and its numbers and remedies are true."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest

from perf_model.prediction.cost import CostModel
from perf_model.prediction.memory import DEFAULT_SETUP, TrainingSetup, memory_of
from perf_model.presets.machines import MACHINES
from perf_model.presets.models import MODELS
from perf_model.schedule.host_layout import Widths
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.simple_placements import place_all
from perf_model.schedule.workload import Workload
from perf_model.search.budgets import Budgets
from perf_model.search.planner import plan_updates
from perf_model.search.reasons import why_nothing_is_streamed
from perf_model.training_run.job import DEFAULT_SUB_GROUP_SIZE, Job
from perf_model.units import GB
from tests.model.profiles import RATES, profile

SLOW_LINK = {
    **RATES,
    "h2d_bytes_per_s": 1e9,
    "d2h_bytes_per_s": 1e9,
    "both_bytes_per_s": 1.8e9,
    "both_beside_cpu_adam_bytes_per_s": 1.7e9,
}


@dataclass(frozen=True)
class PlanAndReason:
    """A plan, and the reason why it streams nothing."""

    plan: UpdatePlan
    why: str | None


def plan_with_reason(
    workload: Workload, cost: CostModel, gpu_gb: float | None, setup: TrainingSetup = DEFAULT_SETUP
) -> PlanAndReason:
    budgets = Budgets(gpu_bytes=None if gpu_gb is None else int(gpu_gb * GB))
    plan = plan_updates(workload, cost, budgets, setup=setup).plan
    return PlanAndReason(plan, why_nothing_is_streamed(plan, cost, budgets, setup))


def streams(found: PlanAndReason) -> bool:
    return Placement.STREAMED in found.plan.placements


@pytest.mark.parametrize("grad_bytes", [2, 4])
@pytest.mark.parametrize("model", ["Llama-3-8B", "13B", "Llama-3-70B"])
@pytest.mark.parametrize("machine", ["a100-pcie4", "h100-pcie5", "h200-pcie5", "gh200"])
def test_units_as_long_as_sub_groups_do_not_fit_in_a_tenth_of_a_gpu_and_each_remedy_makes_them_fit(
    machine: str, model: str, grad_bytes: int
) -> None:
    """Check all presets on 4 ranks with accumulation, so that all gradients are on the GPU."""
    hardware = MACHINES[machine].profile(4)
    assert hardware.gpu_memory_bytes is not None
    cost, tenth_gb = CostModel.from_profile(hardware), 0.1 * hardware.gpu_memory_bytes / GB
    setup = TrainingSetup(widths=Widths(param=2, grad=grad_bytes), accumulates=True)
    job = Job(shape=MODELS[model], world_size=4, ranks_per_node=4, micro_batch=1, sequence=2048)
    parameters = [numel for _, numel in job.shape.parameters()]
    workload = Workload.from_parameters(parameters, 4, DEFAULT_SUB_GROUP_SIZE)
    found = plan_with_reason(workload, cost, tenth_gb, setup)
    assert not streams(found)
    assert found.why is not None
    assert f"the budget of {tenth_gb:.1f} GB of GPU memory cannot hold a slot of " in found.why
    gigabytes = re.search(r'"gpu_memory_gb" to at least (\d+\.\d)', found.why)
    assert gigabytes is not None
    shortest = min(range(len(workload.units)), key=lambda index: workload.units[index].numel)
    placements = [Placement.CPU] * len(workload.units)
    placements[shortest] = Placement.STREAMED
    one = UpdatePlan(workload=workload, placements=tuple(placements), num_slots=1)
    needed_gb = memory_of(one, setup).gpu_bytes / GB
    assert needed_gb <= float(gigabytes[1]) < needed_gb + 0.1
    size = re.search(r'"unit_size" to (\d+)', found.why)
    gradients_gb = grad_bytes * workload.numel / GB
    # If not even the gradients fit, smaller units do not help.
    assert (size is None) == (tenth_gb - gradients_gb < 2 * 12 * 5e6 / GB)
    assert (size is None) == ("or use more ranks" in found.why)
    if size is not None:
        again = plan_with_reason(job.workload(int(size[1])), cost, tenth_gb, setup)
        assert again.why is None or "cannot hold" not in again.why


@pytest.mark.parametrize(
    ("setup", "gradients", "needed"),
    [(TrainingSetup(), "2.0", "14.1"), (TrainingSetup(accumulates=True), "4.0", "16.1")],
)
def test_the_reason_names_the_budget_the_needed_memory_and_the_remedy(
    setup: TrainingSetup, gradients: str, needed: str
) -> None:
    cost = CostModel.from_profile(profile())
    found = plan_with_reason(Workload.from_numels([10**9, 10**9]), cost, gpu_gb=8.0, setup=setup)
    assert found.why == (
        "Nothing is streamed: the budget of 8.0 GB of GPU memory cannot hold a slot of 12.0 GB in addition to "
        f'{gradients} GB of gradients. Set "gpu_memory_gb" to at least {needed}, or "unit_size" to '
        f"{200_000_000 if not setup.accumulates else 100_000_000}."
    )


def test_with_a_slow_link_streaming_is_slower_and_the_reason_names_both_times() -> None:
    workload = Workload.from_numels([10**8] * 8)
    fast, found = (
        plan_with_reason(workload, CostModel.from_profile(profile(rates)), gpu_gb=4.0) for rates in (RATES, SLOW_LINK)
    )
    assert streams(fast)
    assert fast.why is None
    assert not streams(found)
    assert found.why is not None
    found = re.search(r"predicted to take (\S+) (\S+) without streaming, and (\S+) (\S+) at best with it", found.why)
    assert found is not None
    without, without_unit, best, best_unit = found.groups()
    units = {"s": 1.0, "ms": 1e-3}
    assert float(without) * units[without_unit] <= float(best) * units[best_unit]


def test_without_a_rate_of_adam_on_the_gpu_the_reason_is_the_profile() -> None:
    found = plan_with_reason(
        Workload.from_numels([10**8] * 4),
        CostModel.from_profile(profile({**RATES, "gpu_adam_params_per_s": None})),
        gpu_gb=8.0,
    )
    assert found.why is not None
    assert "the hardware profile has no rate of Adam on the GPU" in found.why


def test_states_that_all_fit_are_not_streamed() -> None:
    found = plan_with_reason(Workload.from_numels([10**8] * 4), CostModel.from_profile(profile()), gpu_gb=None)
    assert set(found.plan.placements) == {Placement.RESIDENT}
    assert found.why == "Nothing is streamed: the states of all units fit into GPU memory, and stay there."


def test_an_accelerator_that_cannot_update_is_the_reason_before_any_other() -> None:
    workload, cost = Workload.from_numels([10**9]), CostModel.from_profile(profile())
    on_cpu = UpdatePlan(workload=workload, placements=place_all(workload, Placement.CPU), num_slots=1)
    why = why_nothing_is_streamed(on_cpu, cost, Budgets(gpu_bytes=0), DEFAULT_SETUP, unavailable="Triton is missing.")
    assert why == "Nothing is streamed: Triton is missing."
