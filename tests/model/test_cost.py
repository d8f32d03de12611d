"""The cost model: what each action takes of what, with a GPU and with the CPU as accelerator."""

from __future__ import annotations

import pytest

from perf_model.prediction.cost import CostModel, Resource
from perf_model.prediction.hardware import OF_AN_ACCELERATOR, ProfileError
from perf_model.schedule.action import ActionKind
from perf_model.schedule.placement import Placement
from tests.model.profiles import RATES, profile

NUMEL = 10**9


def test_bytes_of_each_action() -> None:
    cost = CostModel.of(profile())
    amounts = {kind: cost.load(kind, NUMEL).amounts for kind in ActionKind}
    assert amounts[ActionKind.PREFETCH][Resource.H2D] == 12 * NUMEL
    assert amounts[ActionKind.FLUSH_STATES][Resource.D2H] == 12 * NUMEL
    assert amounts[ActionKind.PUBLISH][Resource.H2D] == 2 * NUMEL
    # Both directions count in their joint limit, and every transfer in host memory.
    for kind, bytes_each in ((ActionKind.PREFETCH, 12), (ActionKind.FLUSH_STATES, 12), (ActionKind.PUBLISH, 2)):
        assert amounts[kind][Resource.BOTH] == amounts[kind][Resource.DRAM] == bytes_each * NUMEL
        assert cost.load(kind, NUMEL).alone_s == pytest.approx(
            bytes_each * NUMEL / (26e9 if kind is ActionKind.FLUSH_STATES else 25e9)
        )
    # p, m, v read and written, the gradient read, 16 bit written.
    assert amounts[ActionKind.CPU_STEP][Resource.DRAM] == (24 + 2 + 2) * NUMEL
    assert CostModel.of(profile(), 4).load(ActionKind.CPU_STEP, NUMEL).amounts[Resource.DRAM] == (24 + 4) * NUMEL
    # Gradient scaled in place, Adam, rounding.
    stock = CostModel.of_stock(profile()).load(ActionKind.CPU_STEP, NUMEL)
    assert stock.amounts[Resource.DRAM] == (8 + 28 + 6) * NUMEL
    assert stock.alone_s == pytest.approx(NUMEL / 1e9)


@pytest.mark.parametrize("param_bytes", [2, 4])
def test_bytes_of_each_action_with_parameters_in_host_memory(param_bytes: int) -> None:
    cost = CostModel.of(profile(), param_bytes, params_on_host=True)
    amounts = {kind: cost.load(kind, NUMEL).amounts for kind in ActionKind}
    assert amounts[ActionKind.PUBLISH] == {}
    assert cost.load(ActionKind.PUBLISH, NUMEL).total_s == 0
    assert amounts[ActionKind.GPU_STEP][Resource.D2H] == param_bytes * NUMEL
    assert amounts[ActionKind.CPU_STEP][Resource.DRAM] == (24 + param_bytes + param_bytes) * NUMEL


def test_latency_of_each_copy() -> None:
    cost = CostModel.of(profile())
    latencies = {kind: cost.load(kind, NUMEL).latency_s for kind in ActionKind}
    assert latencies[ActionKind.PREFETCH] == pytest.approx(3e-5)
    assert latencies[ActionKind.FLUSH_STATES] == pytest.approx(3e-5)
    assert latencies[ActionKind.PUBLISH] == pytest.approx(1e-5)
    assert latencies[ActionKind.CPU_STEP] == latencies[ActionKind.GPU_STEP] == 0.0


def test_stock_publishes_from_pageable_memory() -> None:
    ours, stock = CostModel.of(profile()), CostModel.of_stock(profile())
    assert stock.load(ActionKind.PUBLISH, NUMEL).alone_s == pytest.approx(2 * NUMEL / 8e9)
    assert stock.load(ActionKind.PUBLISH, NUMEL).amounts[Resource.DRAM] == 3 * 2 * NUMEL
    assert ours.load(ActionKind.PUBLISH, NUMEL).alone_s == pytest.approx(2 * NUMEL / 25e9)


def test_host_memory_gives_what_it_gave_to_adam_and_transfers_together() -> None:
    """80 GB/s were measured by reading and writing alone; beside each other Adam and transfers may have had more."""
    quick = {**RATES, "cpu_adam_params_per_s": 2e9, "cpu_adam_beside_transfers_params_per_s": 1.8e9}
    assert CostModel.of(profile(quick)).capacities[Resource.DRAM] == pytest.approx(28 * 1.8e9 + 38e9)
    assert CostModel.of(profile()).capacities[Resource.DRAM] == pytest.approx(80e9)
    alone = {**RATES, "cpu_adam_beside_transfers_params_per_s": None, "both_beside_cpu_adam_bytes_per_s": None}
    assert CostModel.of(profile(alone)).capacities[Resource.DRAM] == pytest.approx(80e9)


def test_without_adam_on_the_accelerator_all_is_updated_on_the_cpu() -> None:
    cost = CostModel.of(profile({**RATES, "gpu_adam_params_per_s": None}))
    assert cost.placements == (Placement.CPU,)
    assert set(CostModel.of(profile()).placements) == set(Placement)


def test_without_any_rate_of_an_accelerator_it_is_the_cpu() -> None:
    hosts = {name: rate for name, rate in RATES.items() if name not in OF_AN_ACCELERATOR}
    assert set(CostModel.of(profile(hosts)).capacities) == {Resource.CPU}
    assert CostModel.of(profile(hosts)).blocks
    assert {kind: CostModel.of(profile(hosts)).load(kind, NUMEL).total_s for kind in ActionKind} == pytest.approx(
        {
            # A copied byte is read and written; each copy has the threads to wake.
            ActionKind.PREFETCH: 12 * NUMEL * 2 / RATES["dram_copy_bytes_per_s"] + 3 * RATES["copy_latency_s"],
            ActionKind.GPU_STEP: NUMEL / RATES["cpu_adam_params_per_s"],
            ActionKind.FLUSH_STATES: 12 * NUMEL * 2 / RATES["dram_copy_bytes_per_s"] + 3 * RATES["copy_latency_s"],
            ActionKind.CPU_STEP: NUMEL / RATES["cpu_adam_params_per_s"],
            # Parameters are updated where the model has them.
            ActionKind.PUBLISH: 0,
        }
    )
    assert CostModel.of(profile(hosts), param_bytes=4).load(ActionKind.PUBLISH, NUMEL).total_s == 0
    # Stock copies fp32 parameters after its update.
    fp32_s = CostModel.of_stock(profile(hosts), param_bytes=4).load(ActionKind.PUBLISH, NUMEL).total_s
    assert fp32_s == pytest.approx(4 * NUMEL * 2 / RATES["dram_copy_bytes_per_s"] + RATES["copy_latency_s"])
    with pytest.raises(ProfileError, match="h2d_bytes_per_s: is needed here"):
        CostModel.of(profile({**hosts, "gpu_adam_params_per_s": 8e10}))


@pytest.mark.parametrize("name", ["h2d_bytes_per_s", "d2h_bytes_per_s", "both_bytes_per_s", "cpu_adam_params_per_s"])
def test_a_rate_that_is_needed_and_waived_is_named(name: str) -> None:
    with pytest.raises(ProfileError, match=name):
        CostModel.of(profile({**RATES, name: None}))
