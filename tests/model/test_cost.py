"""Check the cost model: the resources that each action uses, with a GPU and with the CPU as accelerator."""

from __future__ import annotations

import pytest

from perf_model.prediction.cost import CPU_ADAM, CostModel, Resource
from perf_model.prediction.hardware import ACCELERATOR_RATES, ProfileError
from perf_model.schedule.action import ActionKind
from perf_model.schedule.host_layout import WIDTHS_OF_STATES, Widths
from perf_model.schedule.placement import Placement
from tests.model.profiles import RATES, profile

NUMEL = 10**9


def test_each_action_moves_the_bytes_per_parameter_that_are_documented() -> None:
    cost = CostModel.from_profile(profile())
    amounts = {kind: cost.load(kind, NUMEL).amounts for kind in cost.per_param}
    assert amounts[ActionKind.PREFETCH][Resource.H2D] == 12 * NUMEL
    assert amounts[ActionKind.FLUSH_STATES][Resource.D2H] == 12 * NUMEL
    assert amounts[ActionKind.PUBLISH][Resource.H2D] == 2 * NUMEL
    # Transfers in both directions count in the joint limit, and every transfer counts in host memory.
    for kind, bytes_each in ((ActionKind.PREFETCH, 12), (ActionKind.FLUSH_STATES, 12), (ActionKind.PUBLISH, 2)):
        assert amounts[kind][Resource.BOTH] == amounts[kind][Resource.DRAM] == bytes_each * NUMEL
        assert cost.load(kind, NUMEL).alone_s == pytest.approx(
            bytes_each * NUMEL / (26e9 if kind is ActionKind.FLUSH_STATES else 25e9)
        )
    # p, m and v are read and written, the gradient is read, and the 16-bit parameter is written.
    assert amounts[ActionKind.CPU_STEP][Resource.DRAM] == (24 + 2 + 2) * NUMEL
    fp32 = CostModel.from_profile(profile(), Widths(param=4, grad=4))
    assert fp32.load(ActionKind.CPU_STEP, NUMEL).amounts[Resource.DRAM] == (24 + 4) * NUMEL
    # An eager unit is updated by the same pass, and its versions change places for nothing.
    assert amounts[ActionKind.SPECULATE] == amounts[ActionKind.CPU_STEP]
    assert (amounts[ActionKind.COMMIT], cost.load(ActionKind.COMMIT, NUMEL).total_s) == ({}, 0.0)
    # Stock scales the gradient in place, runs Adam, and rounds.
    stock = CostModel.for_stock(profile()).load(ActionKind.CPU_STEP, NUMEL)
    assert stock.amounts[Resource.DRAM] == (8 + 28 + 6) * NUMEL
    assert stock.alone_s == pytest.approx(NUMEL / 1e9)


@pytest.mark.parametrize("param_bytes", [2, 4])
def test_with_parameters_in_host_memory_the_gpu_copies_down_and_nothing_is_published(param_bytes: int) -> None:
    cost = CostModel.from_profile(profile(), Widths(param=param_bytes, grad=param_bytes, publishes=False))
    amounts = {kind: cost.load(kind, NUMEL).amounts for kind in cost.per_param}
    assert amounts[ActionKind.PUBLISH] == {}
    # The parameters of an eager unit are copied to the model.
    assert amounts[ActionKind.COMMIT] == {Resource.DRAM: 2 * param_bytes * NUMEL}
    assert cost.load(ActionKind.PUBLISH, NUMEL).total_s == 0
    assert amounts[ActionKind.GPU_STEP][Resource.D2H] == param_bytes * NUMEL
    assert amounts[ActionKind.CPU_STEP][Resource.DRAM] == (24 + param_bytes + param_bytes) * NUMEL


@pytest.mark.parametrize(
    ("states", "staged", "cpu_step", "stock_step"),
    [("bf16-masters", 10, 2 * 10 + 2, 4 + (20 + 2)), ("bf16", 6, 2 * 6 + 2, 4 + (12 + 2))],
)
def test_bf16_states_move_fewer_bytes(states: str, staged: int, cpu_step: int, stock_step: int) -> None:
    widths = WIDTHS_OF_STATES[states]
    cost, stock = CostModel.from_profile(profile(), widths), CostModel.for_stock(profile(), widths)
    amounts = {kind: cost.load(kind, NUMEL).amounts for kind in cost.per_param}
    assert amounts[ActionKind.PREFETCH][Resource.H2D] == staged * NUMEL
    assert amounts[ActionKind.FLUSH_STATES][Resource.D2H] == staged * NUMEL
    # The masters are published themselves: no other parameters are written.
    assert amounts[ActionKind.CPU_STEP][Resource.DRAM] == amounts[ActionKind.SPECULATE][Resource.DRAM]
    assert amounts[ActionKind.CPU_STEP][Resource.DRAM] == cpu_step * NUMEL
    assert amounts[ActionKind.PUBLISH][Resource.H2D] == 2 * NUMEL
    assert amounts[ActionKind.GPU_STEP][Resource.GPU] == pytest.approx(
        (2 * staged + 4) / 28 * NUMEL / RATES["gpu_adam_params_per_s"]
    )
    # Without a rate of its own, each kernel is as much faster as it moves fewer bytes.
    assert amounts[ActionKind.CPU_STEP][Resource.CPU] == pytest.approx(
        cpu_step / 28 * NUMEL / RATES["cpu_adam_params_per_s"]
    )
    assert stock.load(ActionKind.CPU_STEP, NUMEL).amounts[Resource.DRAM] == stock_step * NUMEL
    assert stock.load(ActionKind.CPU_STEP, NUMEL).amounts[Resource.CPU] == pytest.approx(stock_step / 42 * NUMEL / 1e9)
    measured = profile({**RATES, CPU_ADAM[widths.master, widths.moment]: 3e9})
    assert CostModel.from_profile(measured, widths).load(ActionKind.CPU_STEP, NUMEL).alone_s == NUMEL / 3e9


def test_each_copy_of_an_action_has_its_latency() -> None:
    cost = CostModel.from_profile(profile())
    latencies = {kind: cost.load(kind, NUMEL).latency_s for kind in cost.per_param}
    assert latencies[ActionKind.PREFETCH] == pytest.approx(3e-5)
    assert latencies[ActionKind.FLUSH_STATES] == pytest.approx(3e-5)
    assert latencies[ActionKind.PUBLISH] == pytest.approx(1e-5)
    assert latencies[ActionKind.CPU_STEP] == latencies[ActionKind.GPU_STEP] == 0.0


def test_stock_publishes_from_pageable_memory() -> None:
    ours, stock = CostModel.from_profile(profile()), CostModel.for_stock(profile())
    assert stock.load(ActionKind.PUBLISH, NUMEL).alone_s == pytest.approx(2 * NUMEL / 8e9)
    assert stock.load(ActionKind.PUBLISH, NUMEL).amounts[Resource.DRAM] == 3 * 2 * NUMEL
    assert ours.load(ActionKind.PUBLISH, NUMEL).alone_s == pytest.approx(2 * NUMEL / 25e9)


def test_host_memory_has_the_bandwidth_that_adam_and_transfers_reached_together() -> None:
    """Check the capacity: reads and writes alone reached 80 GB/s; Adam and transfers together may reach more."""
    quick = {**RATES, "cpu_adam_params_per_s": 2e9, "cpu_adam_beside_transfers_params_per_s": 1.8e9}
    assert CostModel.from_profile(profile(quick)).capacities[Resource.DRAM] == pytest.approx(28 * 1.8e9 + 38e9)
    assert CostModel.from_profile(profile()).capacities[Resource.DRAM] == pytest.approx(80e9)
    alone = {**RATES, "cpu_adam_beside_transfers_params_per_s": None, "both_beside_cpu_adam_bytes_per_s": None}
    assert CostModel.from_profile(profile(alone)).capacities[Resource.DRAM] == pytest.approx(80e9)


def test_host_memory_is_not_assumed_to_serve_both_directions_at_once_if_their_rate_is_waived() -> None:
    slow = {"dram_update_bytes_per_s": 20e9, "cpu_adam_params_per_s": 0.5e9, "stock_cpu_adam_params_per_s": 0.4e9}
    waived = {**RATES, **slow, "both_bytes_per_s": None, "cpu_adam_beside_transfers_params_per_s": None}
    capacities = CostModel.from_profile(profile(waived)).capacities
    assert capacities[Resource.DRAM] == RATES["d2h_bytes_per_s"], "one direction is a lower bound"
    assert capacities[Resource.BOTH] == RATES["d2h_bytes_per_s"] + RATES["h2d_bytes_per_s"], "an upper bound"
    concurrent = {**waived, "cpu_adam_beside_transfers_params_per_s": 0.4e9}
    assert CostModel.from_profile(profile(concurrent)).capacities[Resource.DRAM] == pytest.approx(28 * 0.4e9 + 38e9)


def test_without_a_rate_of_adam_on_the_gpu_everything_is_updated_on_the_cpu() -> None:
    cost = CostModel.from_profile(profile({**RATES, "gpu_adam_params_per_s": None}))
    assert cost.placements == (Placement.CPU,)
    assert set(CostModel.from_profile(profile()).placements) == set(Placement)


def test_without_any_rate_of_an_accelerator_the_accelerator_is_the_cpu() -> None:
    host_rates = {name: rate for name, rate in RATES.items() if name not in ACCELERATOR_RATES}
    assert set(CostModel.from_profile(profile(host_rates)).capacities) == {Resource.CPU}
    assert {
        kind: CostModel.from_profile(profile(host_rates)).load(kind, NUMEL).total_s
        for kind in CostModel.from_profile(profile(host_rates)).per_param
    } == pytest.approx(
        {
            # A copied byte is read and written. The latency of a copy is the time to wake the threads.
            ActionKind.PREFETCH: 12 * NUMEL * 2 / RATES["dram_copy_bytes_per_s"] + 3 * RATES["copy_latency_s"],
            ActionKind.GPU_STEP: NUMEL / RATES["cpu_adam_params_per_s"],
            ActionKind.FLUSH_STATES: 12 * NUMEL * 2 / RATES["dram_copy_bytes_per_s"] + 3 * RATES["copy_latency_s"],
            ActionKind.CPU_STEP: NUMEL / RATES["cpu_adam_params_per_s"],
            ActionKind.SPECULATE: NUMEL / RATES["cpu_adam_params_per_s"],
            # The parameters of an eager unit are copied to the model.
            ActionKind.COMMIT: 2 * NUMEL * 2 / RATES["dram_copy_bytes_per_s"],
            # The CPU updates the parameters of the model in place.
            ActionKind.PUBLISH: 0,
        }
    )
    fp32 = Widths(param=4, grad=4)
    assert CostModel.from_profile(profile(host_rates), fp32).load(ActionKind.PUBLISH, NUMEL).total_s == 0
    # Stock copies fp32 parameters after its update.
    fp32_s = CostModel.for_stock(profile(host_rates), fp32).load(ActionKind.PUBLISH, NUMEL).total_s
    assert fp32_s == pytest.approx(4 * NUMEL * 2 / RATES["dram_copy_bytes_per_s"] + RATES["copy_latency_s"])
    with pytest.raises(ProfileError, match="h2d_bytes_per_s: is needed to predict the update"):
        CostModel.from_profile(profile({**host_rates, "gpu_adam_params_per_s": 8e10}))


@pytest.mark.parametrize("name", ["h2d_bytes_per_s", "d2h_bytes_per_s", "cpu_adam_params_per_s"])
def test_the_error_for_a_waived_rate_that_is_needed_names_it(name: str) -> None:
    with pytest.raises(ProfileError, match=name):
        CostModel.from_profile(profile({**RATES, name: None}))
