"""Check hardware profiles, the resources that each action uses by them, and the lower bound of an update."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perf_model.prediction.cost import UPDATES_ON_CPU, UPDATES_ON_GPU, CostModel, Resource
from perf_model.prediction.hardware import (
    ACCELERATOR_RATES,
    REQUIRED,
    RETIRED_QUANTITIES,
    HardwareProfile,
    Measurement,
    ProfileError,
)
from perf_model.prediction.memory import DEFAULT_SETUP, TrainingSetup
from perf_model.prediction.work_bound import work_bound
from perf_model.schedule.action import ActionKind
from perf_model.schedule.host_layout import Widths
from perf_model.schedule.placement import Placement
from perf_model.schedule.workload import Workload
from perf_model.training_run.micro_batch import training_flops_per_s
from tests.model.costs import cost
from tests.model.profiles import RATES, profile


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_written_profile_is_read_as_the_same_profile(encoding: str, tmp_path: Path) -> None:
    saved = json.loads(profile().to_json())
    for name in RETIRED_QUANTITIES:
        saved["measurements"][name] = {"samples": [9e9]}
    path = tmp_path / "profile.json"
    for text in (profile().to_json(), json.dumps(saved)):
        path.write_text(text, encoding=encoding)
        assert HardwareProfile.read(path) == profile()


def test_a_profile_gives_medians_and_spreads_and_refuses_a_waived_rate_that_is_needed() -> None:
    measurement = Measurement(samples=(5.0, 1.0, 2.0, 4.0, 3.0, 100.0))
    assert (measurement.median, measurement.spread) == (3.5, (2.0, 5.0))
    without = profile({**RATES, "gpu_adam_params_per_s": None})
    assert without.has_accelerator
    assert not replace(profile({name: RATES[name] for name in REQUIRED}), gpu_memory_bytes=None).has_accelerator
    assert without.get("gpu_adam_params_per_s") is None
    # Other processes can disturb the measurement of both directions. Then it is waived, and a plan is made without it.
    capacities = CostModel.from_profile(profile({**RATES, "both_bytes_per_s": None})).capacities
    assert capacities[Resource.BOTH] == pytest.approx(25e9 + 26e9)
    with pytest.raises(ProfileError, match=r"gpu_adam_params_per_s: is needed to predict the update, found nothing"):
        without.rate("gpu_adam_params_per_s")
    with pytest.raises(ProfileError, match=r"matmul_flops_per_s: is needed to predict forward .*not in the profile"):
        training_flops_per_s(profile())


def raw(**changes: Any) -> str:
    """Return a profile as JSON with these changes; a value of ``"missing"`` removes the key."""
    values = json.loads(profile().to_json()) | changes
    return json.dumps({key: value for key, value in values.items() if value != "missing"})


def with_rate(name: str, rate: float, **changes: Any) -> str:
    measurements = json.loads(profile().to_json())["measurements"]
    return raw(measurements={**measurements, name: {"samples": [rate]}}, **changes)


BESIDE = "cpu_adam_beside_transfers_params_per_s"
OF_A_CPU = {name: {"samples": [RATES.get(name, 1e15)]} for name in (*REQUIRED, "matmul_flops_per_s")}
AS_WRITTEN = "profile: must be as the program writes it, found"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", r"version: must be the integer 2, found \[1\]"),
        (raw(version=1), "version: must be the integer 2, found 1"),
        (raw(measurements="missing"), f"{AS_WRITTEN} KeyError: 'measurements'"),
        (raw(measurements={}), "cpu_adam_params_per_s: is needed for every prediction, found nothing"),
        (raw(measurements={"speed": {"samples": [1]}}), "measurements: must only have the keys .*, found speed"),
        (raw(gpu_memory_bytes=80), r"gpu_memory_bytes: must be from 1e\+09"),
        (raw(gpu_memory_bytes=None, measurements=OF_A_CPU), "flops_per_s: must be from 1e.08 to 2e.14 on this CPU"),
        (raw(gpu_peak_flops=989), r"gpu_peak_flops: must be from 1e\+12"),
        (with_rate("matmul_flops_per_s", 6e11), "matmul_flops_per_s: must be from 1e.12 to 1e.17 on this GPU"),
        (with_rate("matmul_flops_per_s", 1.2e15, gpu_peak_flops=989e12), "1.2 times gpu_peak_flops .*, found 12"),
        (with_rate("both_bytes_per_s", 1e11), "cannot exceed h2d_bytes_per_s plus d2h_bytes_per_s"),
        (with_rate(BESIDE, 5e9), f"{BESIDE}: cannot exceed cpu_adam_params_per_s"),
        (with_rate("both_beside_cpu_adam_bytes_per_s", 7e10), "adam_bytes_per_s: cannot exceed both_bytes_per_s"),
    ],
)
def test_a_bad_profile_is_refused_with_rule_value_and_remedy(text: str, message: str) -> None:
    with pytest.raises(ProfileError, match=message) as caught:
        HardwareProfile.from_json(text)
    assert len(str(caught.value).splitlines()) >= 2, "the remedy"


NUMEL = 10**9


def amounts_of(cost: CostModel) -> dict[ActionKind, Mapping[Resource, float]]:
    return {kind: cost.load(kind, NUMEL).amounts for kind in cost.per_param}


def test_each_action_moves_the_bytes_per_parameter_that_are_documented() -> None:
    cost = CostModel.from_profile(profile())
    amounts = amounts_of(cost)
    # Transfers in both directions count in the joint limit, and every transfer counts in host memory.
    for kind, link, bytes_each, rate, copies in (
        (ActionKind.PREFETCH, Resource.H2D, 12, 25e9, 3),
        (ActionKind.FLUSH_STATES, Resource.D2H, 12, 26e9, 3),
        (ActionKind.PUBLISH, Resource.H2D, 2, 25e9, 1),
    ):
        assert amounts[kind][link] == amounts[kind][Resource.BOTH] == amounts[kind][Resource.DRAM] == bytes_each * NUMEL
        assert cost.load(kind, NUMEL).alone_s == pytest.approx(bytes_each * NUMEL / rate)
        assert cost.load(kind, NUMEL).latency_s == pytest.approx(copies * 1e-5)
    # p, m and v are read and written, the gradient is read, and the 16-bit parameter is written.
    assert amounts[ActionKind.CPU_STEP][Resource.DRAM] == (24 + 2 + 2) * NUMEL
    fp32 = CostModel.from_profile(profile(), Widths(param=4, grad=4))
    assert fp32.load(ActionKind.CPU_STEP, NUMEL).amounts[Resource.DRAM] == (24 + 4) * NUMEL
    # An eager unit is updated by the same pass, and its versions change places for nothing.
    assert amounts[ActionKind.SPECULATE] == amounts[ActionKind.CPU_STEP]
    assert (amounts[ActionKind.COMMIT], cost.load(ActionKind.COMMIT, NUMEL).total_s) == ({}, 0.0)


def test_stock_scales_gradients_and_publishes_pageable_memory_and_parameters_on_the_host_are_not_published() -> None:
    stock = CostModel.for_stock(profile())
    assert stock.load(ActionKind.CPU_STEP, NUMEL).amounts[Resource.DRAM] == (8 + 28 + 6) * NUMEL
    assert stock.load(ActionKind.CPU_STEP, NUMEL).alone_s == pytest.approx(NUMEL / 1e9)
    assert stock.load(ActionKind.PUBLISH, NUMEL).alone_s == pytest.approx(2 * NUMEL / 8e9)
    assert stock.load(ActionKind.PUBLISH, NUMEL).amounts[Resource.DRAM] == 3 * 2 * NUMEL
    # Parameters in host memory are not published, and the GPU copies them down.
    amounts = amounts_of(CostModel.from_profile(profile(), Widths(param=2, grad=2, publishes=False)))
    assert amounts[ActionKind.PUBLISH] == {}
    # The parameters of an eager unit are copied to the model.
    assert amounts[ActionKind.COMMIT] == {Resource.DRAM: 2 * 2 * NUMEL}
    assert amounts[ActionKind.GPU_STEP][Resource.D2H] == 2 * NUMEL
    assert amounts[ActionKind.CPU_STEP][Resource.DRAM] == (24 + 2 + 2) * NUMEL


def test_host_memory_has_the_bandwidth_that_adam_and_transfers_reached_together() -> None:
    quick = {**RATES, "cpu_adam_params_per_s": 2e9, "cpu_adam_beside_transfers_params_per_s": 1.8e9}
    assert CostModel.from_profile(profile(quick)).capacities[Resource.DRAM] == pytest.approx(28 * 1.8e9 + 38e9)
    assert CostModel.from_profile(profile()).capacities[Resource.DRAM] == pytest.approx(80e9)
    alone = {**RATES, "cpu_adam_beside_transfers_params_per_s": None, "both_beside_cpu_adam_bytes_per_s": None}
    assert CostModel.from_profile(profile(alone)).capacities[Resource.DRAM] == pytest.approx(80e9)


def test_without_rates_of_an_accelerator_everything_is_updated_on_the_cpu() -> None:
    assert set(CostModel.from_profile(profile()).placements) == set(Placement)
    assert CostModel.from_profile(profile({**RATES, "gpu_adam_params_per_s": None})).placements == (Placement.CPU,)
    host_rates = {name: rate for name, rate in RATES.items() if name not in ACCELERATOR_RATES}
    cost = CostModel.from_profile(profile(host_rates))
    assert set(cost.capacities) == {Resource.CPU}
    # A copied byte is read and written. The latency of a copy is the time to wake the threads.
    adam_s, copied_byte_s = NUMEL / RATES["cpu_adam_params_per_s"], 2 / RATES["dram_copy_bytes_per_s"]
    staged_s = 12 * NUMEL * copied_byte_s + 3 * RATES["copy_latency_s"]
    assert {kind: cost.load(kind, NUMEL).total_s for kind in cost.per_param} == pytest.approx(
        dict.fromkeys((ActionKind.PREFETCH, ActionKind.FLUSH_STATES), staged_s)
        | {ActionKind.ADOPT: 2 * NUMEL * copied_byte_s + RATES["copy_latency_s"]}
        | dict.fromkeys((*UPDATES_ON_CPU, *UPDATES_ON_GPU), adam_s)
        # The parameters of an eager unit are copied to the model, and others updated in place.
        | {ActionKind.COMMIT: 2 * NUMEL * copied_byte_s, ActionKind.PUBLISH: 0}
    )
    # Stock copies fp32 parameters after its update.
    stock = CostModel.for_stock(profile(host_rates), Widths(param=4, grad=4))
    expected_s = 4 * NUMEL * copied_byte_s + RATES["copy_latency_s"]
    assert stock.load(ActionKind.PUBLISH, NUMEL).total_s == pytest.approx(expected_s)


WORKLOAD = Workload.from_numels([10**6] * 1000)
A_SLOT = 12 * 10**6

# All gradients, 2 GB, are on the accelerator. There is memory for them, and for a thousandth of the states.
SUMS, ONLY_STREAMED = TrainingSetup(accumulates=True), 2 * 10**9 + A_SLOT


@pytest.mark.parametrize(
    ("model", "gpu_bytes", "setup", "seconds", "binding"),
    [
        # 1 s of updates, and 2 GB to the accelerator at 12 GB/s at the same time. Not even a slot fits.
        (cost(), A_SLOT - 1, DEFAULT_SETUP, 1.0, Resource.CPU),
        (cost().without_accelerator(), None, DEFAULT_SETUP, 1.0, Resource.CPU),
        (cost(h2d=1e9), 0, DEFAULT_SETUP, 2.0, Resource.H2D),
        # With the share x on the CPU, 12 (1 - x) + 2 x GB go to the accelerator in the x seconds of the CPU.
        (cost(), ONLY_STREAMED, SUMS, 12 / 22, None),
        # 12 GB to the accelerator and back.
        (cost(cpu=1e3, d2h=4e9), ONLY_STREAMED, SUMS, 3.0, Resource.D2H),
        (cost(), ONLY_STREAMED + 6 * 10**9, SUMS, 12 / 22 / 2, None),
        # The GPU is ten times as fast as the CPU: each gets its share.
        (cost(gpu=1e10), None, DEFAULT_SETUP, 1 / 11, None),
        # Without accumulation, a resident parameter takes 14 bytes.
        (cost(h2d=1e15, d2h=1e6), 7 * 10**9, DEFAULT_SETUP, 0.5, None),
        (cost(h2d=1e15, d2h=1e6), 8 * 10**9, SUMS, 0.5, None),
        # A streamed parameter takes 2 bytes: with 0.5 GB, a quarter of them can be streamed.
        (cost(h2d=1e15, d2h=1e15), 5 * 10**8, DEFAULT_SETUP, 0.75, None),
    ],
)
def test_the_bound_equals_the_work_counted_by_hand(
    model: CostModel, gpu_bytes: int | None, setup: TrainingSetup, seconds: float, binding: Resource | None
) -> None:
    found = work_bound(WORKLOAD, model, gpu_bytes, setup)
    assert found.seconds == pytest.approx(seconds, rel=0.002)
    assert binding is None or found.binding is binding
