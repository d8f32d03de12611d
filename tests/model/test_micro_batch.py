"""Test forward and backward of a micro-batch: which of arithmetic, launches and network takes longest."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perf_model.prediction.hardware import ACCELERATOR_RATES
from perf_model.prediction.network import Network
from perf_model.presets.machines import MACHINES
from perf_model.presets.models import MODELS
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan, place_all
from perf_model.training_run.forecast import Forecast, MemoryLimits, Overlap, PredictedIteration
from perf_model.training_run.job import Job
from perf_model.training_run.micro_batch import (
    NEAREST_HOST,
    NO_OVERHEADS,
    TRAINING_SHARE,
    GradientPath,
    MatrixRate,
    Overheads,
    PhaseRates,
)
from perf_model.training_run.model import ModelError
from tests.model.profiles import RATES, profile

NETWORK = Network(
    ranks_per_node=8, all_gather_bytes_per_s=200e9, reduce_scatter_bytes_per_s=160e9, inter_node_bytes_per_s=10e9
)


def test_one_rank_communicates_nothing() -> None:
    assert NETWORK.all_gather_s(1e9, 1) == NETWORK.reduce_scatter_s(1e9, 1) == 0.0


def test_the_ranks_of_a_node_pass_on_all_parts_but_one() -> None:
    assert NETWORK.all_gather_s(8e9, 4) == pytest.approx(6e9 / 200e9)
    assert NETWORK.reduce_scatter_s(8e9, 4) == pytest.approx(6e9 / 160e9)


def test_the_ranks_of_a_node_share_what_crosses_nodes() -> None:
    # 15 of 16 parts leave each node, over the connections of 8 ranks.
    assert NETWORK.all_gather_s(16e9, 16) == NETWORK.reduce_scatter_s(16e9, 16) == pytest.approx(15e9 / 80e9)
    single = replace(NETWORK, ranks_per_node=1)
    assert single.all_gather_s(16e9, 16) == pytest.approx(15e9 / 10e9)


def test_the_slower_of_both_connections_determines_the_time() -> None:
    fast = replace(NETWORK, inter_node_bytes_per_s=100e9)
    assert fast.all_gather_s(16e9, 16) == pytest.approx(15e9 / 200e9)


def test_a_profile_without_rates_of_a_network_communicates_in_no_time() -> None:
    network = Network.from_profile(profile(), 8)
    assert network.all_gather_s(1e12, 64) == network.reduce_scatter_s(1e12, 64) == 0.0
    known = Network.from_profile(profile({**RATES, "all_gather_bytes_per_s": 1e9, "inter_node_bytes_per_s": None}), 8)
    assert known.all_gather_s(2e9, 2) == pytest.approx(1.0)
    assert known.reduce_scatter_s(2e9, 2) == 0.0


@given(st.integers(1, 10**4), st.integers(1, 16), st.floats(1e6, 1e13), st.floats(1, 10))
def test_a_faster_network_is_never_slower(ranks: int, ranks_per_node: int, rate: float, factor: float) -> None:
    slow = replace(NETWORK, ranks_per_node=ranks_per_node, inter_node_bytes_per_s=rate)
    fast = replace(slow, inter_node_bytes_per_s=rate * factor, all_gather_bytes_per_s=200e9 * factor)
    assert fast.all_gather_s(1e9, ranks) <= slow.all_gather_s(1e9, ranks)


JOB = Job(shape=MODELS["7B"], world_size=16, ranks_per_node=8, micro_batch=1, sequence=2048)


GPU = profile({**RATES, "matmul_flops_per_s": 1e14 / TRAINING_SHARE})


NO_NETWORK = Network(ranks_per_node=8)


ALONE = PhaseRates(matrix=MatrixRate(limit_flops_per_s=1e14), network=NO_NETWORK)


def test_without_network_and_overheads_only_the_arithmetic_counts() -> None:
    assert JOB.work.forward_s(ALONE) == JOB.work.forward_flops / 1e14
    assert JOB.work.backward_s(ALONE) == JOB.work.backward_flops / 1e14
    assert PhaseRates.from_profile(GPU, 8, NO_OVERHEADS).network == NO_NETWORK


def test_training_runs_at_the_measured_rate_or_at_a_share_of_the_measured_products() -> None:
    assert MatrixRate.from_profile(GPU).flops_per_s(1e12) == pytest.approx(1e14)
    assert MatrixRate.from_profile(profile({**RATES, "training_flops_per_s": 2e14})).flops_per_s(1e6) == 2e14


def test_a_preset_trains_at_the_rate_that_fits_the_published_runs_and_a_cpu_at_that_of_its_products() -> None:
    rate = MatrixRate.from_profile(MACHINES["h100-pcie5"].profile(ranks=4))
    assert rate.limit_flops_per_s == pytest.approx(MACHINES["h100-pcie5"].matmul_flops)
    assert rate.half_elements == 0
    cpu = profile({**RATES, **dict.fromkeys(ACCELERATOR_RATES), "matmul_flops_per_s": 1e13})
    assert MatrixRate.from_profile(replace(cpu, gpu_memory_bytes=None)).limit_flops_per_s == 1e13


def test_a_host_that_launches_slowly_is_the_limit_of_narrow_layers() -> None:
    slow, modules = replace(ALONE, overheads=Overheads(forward_s=0.1, backward_s=0.2)), JOB.shape.modules
    assert modules == 2 + 32 * 11 + 2, "the model and its list of layers, 11 modules per layer, a norm and a table"
    assert JOB.work.forward_s(slow) == pytest.approx(modules * 0.1)
    assert JOB.work.backward_s(slow) == pytest.approx(modules * 0.3), "with recomputation"
    assert replace(JOB, recompute=False).work.backward_s(slow) == pytest.approx(modules * 0.2)


def test_each_arm_adds_its_own_seconds() -> None:
    host = Overheads(forward_s=1e-3, backward_s=2e-3, gradients_s=3e-3, hooks_s=4e-3)
    assert (host.of_plugin.forward_s, host.of_plugin.backward_s) == (5e-3, 2e-3)
    assert (host.of_stock.forward_s, host.of_stock.backward_s) == (1e-3, 5e-3)


def test_seconds_of_the_host_are_of_the_profile_or_of_our_machines_and_their_source_says_so() -> None:
    modules = {f"module_{name}_s": 1e-3 for name in ("forward", "backward", "gradients", "step")}
    measured = Overheads.from_profile(profile({**RATES, **modules}))
    assert (measured.forward_s, measured.step_s) == (1e-3, 1e-3)
    assert measured.source.startswith("the profile, but hooks and the slowdown by updates are of our runs")
    assert Overheads.from_profile(GPU) == NEAREST_HOST
    cpu = replace(profile({**RATES, **dict.fromkeys(ACCELERATOR_RATES)}), gpu_memory_bytes=None)
    assert Overheads.from_profile(cpu) == replace(NO_OVERHEADS, source="the profile")


def test_gathers_and_reductions_take_as_long_as_the_network_needs() -> None:
    network = Network(ranks_per_node=8, inter_node_bytes_per_s=1e8)
    bound = replace(ALONE, network=network)
    gather_s = 2 * JOB.shape.numel * 15 / 16 / 8e8
    assert JOB.work.forward_s(bound) == pytest.approx(gather_s)
    assert JOB.work.backward_s(bound) == pytest.approx(2 * gather_s), "one gather, and one reduction of as many bytes"
    frozen = replace(JOB, trainable_share=0.01)
    assert frozen.work.backward_s(bound) == pytest.approx(1.01 * gather_s)


def test_offloaded_parameters_are_uploaded_for_each_gather() -> None:
    job = replace(JOB, world_size=1, ranks_per_node=1, offload_param=True)
    slow = replace(ALONE, h2d_bytes_per_s=1e9)
    assert job.work.forward_s(slow) == pytest.approx(2 * job.shape.numel / 1e9)
    assert replace(job, offload_param=False).work.forward_s(slow) == job.work.forward_flops / 1e14


def test_frozen_parameters_have_no_states_and_no_gradients_of_their_own() -> None:
    tenth = replace(JOB, trainable_share=0.1)
    assert tenth.workload(10**8).numel == pytest.approx(0.1 * JOB.workload(10**8).numel, rel=1e-3)
    assert tenth.work.forward_flops / 1e14 == JOB.work.forward_flops / 1e14
    assert JOB.work.backward_flops / 1e14 - tenth.work.backward_flops / 1e14 == pytest.approx(
        0.9 * JOB.work.forward_flops / 1e14
    )
    for share in (0.0, -1.0, 1.01, float("nan")):
        with pytest.raises(ModelError, match="trainable_share: must be above 0 and at most 1, found"):
            replace(JOB, trainable_share=share)


def test_stock_copies_the_sum_up_and_down_in_each_micro_batch_and_the_fp32_gradients_once() -> None:
    workload = JOB.workload(10**8)
    plan = UpdatePlan(workload=workload, placements=place_all(workload, Placement.CPU), num_slots=1)
    numel = workload.numel
    assert GradientPath.for_stock(plan) == GradientPath(
        down_bytes=6 * numel, up_bytes=2 * numel, accumulated_down_bytes=2 * numel, accumulated_up_bytes=2 * numel
    )
    assert GradientPath.for_plan(plan) == GradientPath(down_bytes=2 * numel)


def test_sums_are_copied_in_each_micro_batch_if_nothing_is_updated_on_the_accelerator() -> None:
    workload = JOB.workload(10**8)
    placements = place_all(workload, Placement.CPU)
    on_cpu = UpdatePlan(workload=workload, placements=placements, num_slots=1)
    in_host_memory = GradientPath(
        **dict.fromkeys(("down_bytes", "accumulated_down_bytes", "accumulated_up_bytes"), 2 * workload.numel)
    )
    setup = replace(JOB, accumulation=4).setup
    assert GradientPath.for_plan(on_cpu, setup) == in_host_memory
    assert GradientPath.for_plan(on_cpu, JOB.setup) == GradientPath(down_bytes=2 * workload.numel)
    mixed = replace(on_cpu, placements=(Placement.STREAMED, *placements[1:]))
    assert GradientPath.for_plan(mixed, setup) == GradientPath(down_bytes=2 * mixed.numel(Placement.CPU))
    assert GradientPath.for_plan(mixed, replace(setup, sums_on_accelerator=False)).accumulated_up_bytes > 0


def test_accumulation_repeats_forward_and_backward_and_not_the_update() -> None:
    limits, stock = MemoryLimits(gpu=10**12, host=None), []
    for accumulation in (1, 4):
        job = replace(JOB, world_size=4, ranks_per_node=4, sequence=4096, accumulation=accumulation)
        found = Forecast(job, GPU, limits, Overlap(), [10**8], Overheads(step_s=0.5))
        assert found.predicted.forward_s == pytest.approx(accumulation * job.work.forward_flops / 1e14)
        assert found.windows.forward_s == pytest.approx(job.work.forward_flops / 1e14), "one micro-batch"
        assert found.windows.backward_s == pytest.approx(job.work.backward_flops / 1e14), "the last micro-batch"
        assert found.predicted.fixed_s == pytest.approx(0.5 * job.shape.modules)
        assert found.predicted.tokens_per_s == pytest.approx(4 * 4096 * accumulation / found.predicted.iteration_s)
        outcome = found.baselines["stock"]
        assert isinstance(outcome, PredictedIteration)
        stock.append(outcome)
    assert stock[0].update_s == stock[1].update_s
    assert stock[1].iteration_s < 4 * stock[0].iteration_s
