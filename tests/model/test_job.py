"""Test the memory, windows and utilisation of a training run, against the figures of the papers and by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from perf_model.prediction.hardware import REQUIRED, HardwareProfile
from perf_model.prediction.memory import MIB, DoesNotFit
from perf_model.prediction.overlap_windows import Windows
from perf_model.presets.models import MODELS
from perf_model.schedule.placement import Placement
from perf_model.schedule.rules import PlacementRule, PlacementRules
from perf_model.training_run.decoder import gpt
from perf_model.training_run.forecast import (
    Forecast,
    Infeasible,
    MemoryLimits,
    Overlap,
    PredictedIteration,
)
from perf_model.training_run.job import Job
from perf_model.training_run.micro_batch import TRAINING_SHARE, GradientPath
from perf_model.training_run.model import ModelError
from perf_model.training_run.training_memory import TrainingMemory, reserved_host_bytes
from tests.model.profiles import RATES, profile

GPT_175B = gpt("GPT-3", layers=96, hidden=12288, heads=96, vocab=51200, positions=2048)
JOB = Job(shape=GPT_175B, world_size=1024, ranks_per_node=8, micro_batch=1, sequence=2048)


def test_training_time_is_that_of_the_megatron_paper() -> None:
    """Check equation 4 of arXiv 2104.04473, 8 T P / (n X) s: 34 days for T = 300 B tokens and X = 140 TFLOP/s."""
    tokens, flops = 300e9, 140e12
    iteration_s = JOB.work.forward_flops / flops + JOB.work.backward_flops / flops
    training_s = iteration_s * tokens / JOB.tokens
    assert training_s == pytest.approx(8 * tokens * GPT_175B.numel / (JOB.world_size * flops), rel=0.05)
    assert training_s / 86400 == pytest.approx(34, rel=0.05)
    kept = replace(JOB, recompute=False)
    assert kept.work.forward_flops / flops + kept.work.backward_flops / flops == pytest.approx(
        iteration_s * 6 / 8, rel=0.01
    )


def test_utilisation_does_not_count_recomputation() -> None:
    iteration_s = JOB.work.forward_flops / 140e12 + JOB.work.backward_flops / 140e12
    assert JOB.mfu(iteration_s, 312e12) == pytest.approx(140 / 312 * 6 / 8, rel=0.01)
    assert replace(JOB, recompute=False).mfu(iteration_s, 312e12) == JOB.mfu(iteration_s, 312e12)


@pytest.mark.parametrize("key", ["world_size", "ranks_per_node", "micro_batch", "sequence"])
@pytest.mark.parametrize("value", [0, -1, 10**20, 1.0, True])
def test_impossible_jobs_are_refused(key: str, value: float) -> None:
    with pytest.raises(ModelError, match=f"{key}: must be an integer from 1 to .*, found {value}\\.\nCorrect --"):
        replace(JOB, **{key: value})


SMALL = Job(shape=MODELS["7B"], world_size=4, ranks_per_node=4, micro_batch=1, sequence=16)
"""A job with sequences so short that copying the gradients takes longer than the arithmetic of backward."""

WITH_GPU = profile({**RATES, "matmul_flops_per_s": 1e15})
CPU_ONLY = profile({**{name: RATES[name] for name in REQUIRED}, "matmul_flops_per_s": 1e12})


def forecast_7b(limits: MemoryLimits, job: Job = SMALL, size: int = 100_000_000) -> Forecast:
    return Forecast(job, WITH_GPU, limits, Overlap(), [size])


def test_copies_of_gradients_run_one_after_another() -> None:
    path = GradientPath(down_bytes=6 * 10**9, up_bytes=2 * 10**9)
    expected_s = 6e9 / RATES["d2h_bytes_per_s"] + 2e9 / RATES["h2d_bytes_per_s"]
    assert path.seconds(profile()) == (pytest.approx(expected_s), 0.0)
    waived = {**RATES, "d2h_bytes_per_s": None}
    assert path.seconds(profile(waived)) == (0.0, 0.0)


def test_backward_is_charged_for_the_gradients_of_each_placement() -> None:
    limits = MemoryLimits(gpu=39 * 10**9, host=None)
    found = forecast_7b(limits)
    plan = found.planned.plan
    numel = plan.workload.numel
    assert 0 < plan.numel(Placement.RESIDENT) < numel
    d2h, h2d = RATES["d2h_bytes_per_s"], RATES["h2d_bytes_per_s"]
    assert GradientPath.for_plan(plan) == GradientPath(down_bytes=2 * plan.numel(Placement.CPU))
    compute_s = SMALL.work.backward_flops / (TRAINING_SHARE * 1e15)
    assert found.predicted.backward_s == pytest.approx(max(2 * plan.numel(Placement.CPU) / d2h, compute_s))
    iterations = {name: outcome for name, outcome in found.baselines.items() if isinstance(outcome, PredictedIteration)}
    assert set(iterations) >= {"stock", "twin_flow", "all_cpu", "all_streamed", "stride_2"}
    assert iterations["stock"].backward_s == pytest.approx(6 * numel / d2h + 2 * numel / h2d)
    assert iterations["all_cpu"].backward_s == pytest.approx(2 * numel / d2h)
    assert iterations["all_streamed"].backward_s == pytest.approx(compute_s)
    assert iterations["all_cpu"].backward_s < iterations["twin_flow"].backward_s < iterations["stock"].backward_s
    kept = found.baselines["no_offload"]
    if isinstance(kept, PredictedIteration):
        assert kept.backward_s == pytest.approx(compute_s), "no gradient is copied"


def test_sums_that_do_not_fit_beside_the_units_of_rules_are_in_host_memory() -> None:
    rules = PlacementRules((PlacementRule(("model.layers.0.*",), "resident"),))
    job = replace(SMALL, accumulation=2, rules=rules)
    plenty = forecast_7b(MemoryLimits(gpu=80 * 10**9, host=None), job)
    assert GradientPath.for_plan(plenty.planned.plan, plenty.request.setup).accumulated_down_bytes == 0
    # Training and PyTorch's cache leave 1.9 bytes per parameter: less than the sums of all gradients, which take 2, and
    # more than the states of one layer.
    numel = plenty.planned.plan.workload.numel
    training = TrainingMemory(job)
    gpu_bytes = training.gpu_bytes + training.cache_bytes + int(1.9 * numel)
    short = forecast_7b(MemoryLimits(gpu=gpu_bytes, host=None), job)
    assert not short.budgets.missing(short.planned.memory)
    plan, setup = short.planned.plan, short.request.setup
    assert plan.numel(Placement.STREAMED) == 0 < plan.numel(Placement.RESIDENT) < numel / 16
    assert GradientPath.for_plan(plan, setup).accumulated_down_bytes == 2 * plan.numel(Placement.CPU)
    all_cpu = short.baselines["all_cpu"]
    assert isinstance(all_cpu, PredictedIteration)
    assert short.predicted.backward_s == pytest.approx(all_cpu.backward_s, rel=0.1)


def refusal(job: Job, limits: MemoryLimits, machine: HardwareProfile = WITH_GPU) -> str:
    with pytest.raises(DoesNotFit) as caught:
        Forecast(job, machine, limits, Overlap(), [100_000_000])
    return str(caught.value)


def test_an_error_names_the_options_that_raise_the_budget() -> None:
    limits = MemoryLimits(gpu=15 * 10**9, host=None, pinned=32 * 10**9)
    found = refusal(replace(SMALL, shape=MODELS["20B"]), limits)
    assert "Pinned memory: raise --pinned-memory-gb." in found


def test_the_error_has_the_memory_of_training_where_it_does_not_fit_without_the_optimizer() -> None:
    long = replace(SMALL, shape=MODELS["20B"], sequence=10**6)
    found = refusal(long, MemoryLimits(gpu=12 * 10**9, host=None))
    assert "Without the optimizer, training takes" in found
    assert "of 10.0 GB of GPU memory less the margin" in found
    host = refusal(long, MemoryLimits(gpu=None, host=80 * 10**9), CPU_ONLY)
    assert "of 19.5 GB of host memory per rank" in host


@pytest.mark.parametrize("overlap", [Overlap(backward=False, forward=False), Overlap()])
def test_the_peak_of_training_includes_all_memory_of_the_optimizer(overlap: Overlap) -> None:
    """Check all phases: slots are filled in backward and flushed in forward, and residents and gradients stay."""
    job, limits = replace(SMALL, sequence=2048), MemoryLimits(gpu=32 * 10**9, host=None)
    found = Forecast(job, WITH_GPU, limits, overlap, [100_000_000])
    plan = found.planned.plan
    streamed, resident = plan.numel(Placement.STREAMED), plan.numel(Placement.RESIDENT)
    assert min(streamed, resident) > 0
    slots_bytes = plan.schedule.num_slots * plan.schedule.slot_numel * 12
    training = TrainingMemory(job)
    least_bytes = training.gpu_bytes + training.cache_bytes + slots_bytes + 12 * resident + 2 * (resident + streamed)
    rounding_bytes = 22 * MIB + 10 * MIB * len(plan.placements)
    assert least_bytes <= found.memory.gpu_bytes <= min(30 * 10**9, least_bytes + rounding_bytes)
    assert training.gpu_bytes > training.activation_bytes > 0, "activations of forward and backward"


def test_windows_are_backward_and_forward_if_a_gpu_trains() -> None:
    both = forecast_7b(MemoryLimits(gpu=34 * 10**9, host=None), replace(SMALL, sequence=2048))
    assert both.windows.forward_s == both.predicted.forward_s
    assert 0 < both.windows.backward_s <= both.predicted.backward_s, "without the wait for gradients"
    on_cpu = Forecast(SMALL, CPU_ONLY, MemoryLimits(gpu=None, host=400 * 10**9), Overlap(), [100_000_000])
    assert on_cpu.windows == Windows(), "a CPU cannot train and update at once"
    assert on_cpu.predicted.hidden_update_s == 0


def test_if_the_cpu_trains_everything_is_updated_in_host_memory() -> None:
    limits = MemoryLimits(gpu=None, host=400 * 10**9)
    found = Forecast(SMALL, CPU_ONLY, limits, Overlap(), [100_000_000])
    assert set(found.planned.plan.placements) == {Placement.CPU}
    for name in ("twin_flow", "all_streamed", "stride_2", "no_offload"):
        assert found.baselines[name] == Infeasible(reason="the CPU is the only accelerator")
    assert isinstance(found.baselines["stock"], PredictedIteration)
    assert found.memory.gpu_bytes == 0
    numel = found.planned.plan.workload.numel
    assert found.memory.pinned_bytes == pytest.approx(4 * 14 * numel, rel=1e-6), "parameters are updated in place"
    training_bytes = 4 * (found.planned.memory.host_bytes + TrainingMemory(SMALL).allocated_bytes)
    assert found.memory.host_bytes == reserved_host_bytes(4, has_gpu=False) + training_bytes
    with pytest.raises(DoesNotFit, match=r"exceeds host memory by [\d.]+ GB per rank\.") as caught:
        Forecast(SMALL, CPU_ONLY, MemoryLimits(gpu=None, host=100 * 10**9), Overlap(), [100_000_000])
    assert set(caught.value.missing) == {"host_bytes"}
    assert "--offload-param" not in str(caught.value)


def test_training_without_offload_is_the_same_with_and_without_offloaded_parameters() -> None:
    limits = MemoryLimits(gpu=200 * 10**9, host=None)
    whole = forecast_7b(limits)
    assert isinstance(whole.baselines["no_offload"], PredictedIteration)
    found = forecast_7b(limits, replace(SMALL, offload_param=True))
    assert found.no_offload_bytes == whole.no_offload_bytes
    assert found.baselines["no_offload"] == whole.baselines["no_offload"]
