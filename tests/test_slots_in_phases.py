"""Check the simulation of slots that exist only while the activations' memory is free."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.planner.window_settings import WindowSetting
from benchmarks.slots.emulated_slots import waits_for_slots_s
from benchmarks.slots.phase_curve import ActivationMemory, exposed_with_activation_memory_s, resident_bytes_of
from perf_model.prediction.simulate import Simulator
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan, place_all, place_by_stride
from perf_model.training_run.training_memory import TrainingMemory

SETTING = WindowSetting(machine="h100-pcie5", model="7B", ranks=4, micro_batch=1, gpu_share=0.5)
SIMULATOR = Simulator(SETTING.cost, SETTING.windows)
WORKLOAD = SETTING.workload(50_000_000)
PLANS = {
    "all streamed": UpdatePlan(workload=WORKLOAD, placements=place_all(WORKLOAD, Placement.STREAMED), num_slots=2),
    "stride 2": UpdatePlan(workload=WORKLOAD, placements=place_by_stride(WORKLOAD, 2), num_slots=2),
}


def predicted_s(plan: UpdatePlan) -> float:
    timeline = SIMULATOR.run(plan.schedule, plan.workload)
    return SETTING.windows.exposed_s(timeline, plan.workload, SETTING.cost)


@pytest.mark.parametrize("recompute", [True, False])
def test_the_activations_are_those_that_leave_the_memory_for_the_plan(recompute: bool) -> None:
    job = replace(SETTING.job, recompute=recompute)
    memory, training = ActivationMemory.from_job(job), TrainingMemory(job)
    tokens = job.micro_batch * job.sequence
    assert 0 <= training.activation_bytes - memory.free_bytes <= 10 * tokens * job.shape.hidden


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_without_activation_memory_the_exposed_time_is_the_predicted_one(plan: UpdatePlan) -> None:
    found = exposed_with_activation_memory_s(plan, SIMULATOR, ActivationMemory())
    assert found == pytest.approx(predicted_s(plan), rel=1e-9)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_slots_that_go_in_forward_gain_something_and_less_than_slots_that_stay(plan: UpdatePlan) -> None:
    number = 2
    taken_bytes = number * resident_bytes_of(plan.schedule.slot_numel)
    without_s, going_s, staying_s = (
        exposed_with_activation_memory_s(candidate, SIMULATOR, memory)
        for candidate, memory in (
            (plan, ActivationMemory()),
            (plan, ActivationMemory(layers_bytes=taken_bytes)),
            (replace(plan, num_slots=plan.num_slots + number), ActivationMemory()),
        )
    )
    assert staying_s < going_s < without_s


def test_prefetches_wait_for_fewer_seconds_with_more_slots_and_not_at_all_with_one_per_unit() -> None:
    plan = PLANS["all streamed"]
    waited_s = [
        waits_for_slots_s(SIMULATOR.run(candidate.schedule, WORKLOAD))
        for candidate in (replace(plan, num_slots=number) for number in (1, 2, len(WORKLOAD.units)))
    ]
    assert waited_s[0] > waited_s[1] > waited_s[2] == 0.0
