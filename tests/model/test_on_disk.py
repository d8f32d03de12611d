"""Check which states are placed on disk, the memory and time of plans with them, and the rates of disks."""

from __future__ import annotations

import json
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perf_model.plan_request import PlanRequest
from perf_model.prediction.cost import CostModel, DiskRates, Resource
from perf_model.prediction.hardware import Measurement
from perf_model.prediction.memory import Budgets, TrainingSetup, memory_of
from perf_model.prediction.overlap_windows import Windows
from perf_model.prediction.work_bound import work_bound
from perf_model.schedule.cutting import cut_into_units
from perf_model.schedule.host_layout import SIXTEEN_BIT, WIDTHS_OF_STATES
from perf_model.schedule.on_disk import place_on_disk
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan, place_all
from perf_model.schedule.workload import Partition
from tests.model.profiles import RATES, profile

MILLION = 10**6
LAYERS = [Partition(f"layers.{index}.weight", 4 * MILLION) for index in range(10)]
NORMS = [Partition(f"layers.{index}.norm", 5000, is_persistent=True) for index in range(10)]
DISK = DiskRates.one_after_the_other(6e9, 4e9)


def on_disk(host_bytes: int, **options: object) -> list[str]:
    placed = place_on_disk([LAYERS, NORMS], SIXTEEN_BIT, host_bytes, **options)  # type: ignore[arg-type]
    return [partition.name for partition in chain.from_iterable(placed) if partition.is_on_disk]


def test_nothing_is_on_disk_if_all_states_fit() -> None:
    assert on_disk(16 * sum(partition.numel for partition in [*LAYERS, *NORMS])) == []


def test_the_last_layers_are_on_disk_as_many_as_needed() -> None:
    all_bytes = 16 * sum(partition.numel for partition in [*LAYERS, *NORMS])
    few = on_disk(all_bytes - 12 * 4 * MILLION, disk_unit_size=MILLION)
    assert few == ["layers.8.weight", "layers.9.weight"], "the second makes room for the disk slots"
    assert on_disk(0) == [partition.name for partition in LAYERS]


def test_what_a_rule_places_on_the_accelerator_is_not_on_disk() -> None:
    found = on_disk(0, placement_of=lambda name: Placement.RESIDENT if name.startswith("layers.9") else None)
    assert found == [partition.name for partition in LAYERS[:-1]]


@given(st.integers(0, 700 * MILLION), st.sampled_from(sorted(WIDTHS_OF_STATES)), st.integers(MILLION // 10, 10**7))
def test_the_plan_fits_into_the_budget_unless_all_that_may_be_is_on_disk(
    host_bytes: int, states: str, unit_size: int
) -> None:
    widths = WIDTHS_OF_STATES[states]
    placed = place_on_disk([LAYERS, NORMS], widths, host_bytes, disk_unit_size=unit_size)
    workload = cut_into_units(placed, 7 * MILLION, disk_unit_size=unit_size)
    plan = UpdatePlan(workload=workload, placements=place_all(workload, Placement.CPU), num_slots=1)
    taken = memory_of(plan, TrainingSetup(widths=widths)).host_bytes
    everything = sum(partition.numel for partition in LAYERS)
    pages = 10 * 6 * 4096
    assert taken <= host_bytes + pages or workload.on_disk_numel >= everything


def test_a_plan_with_states_on_disk_is_bound_by_the_disk() -> None:
    placed = place_on_disk([LAYERS, NORMS], SIXTEEN_BIT, 0)
    cost = CostModel.from_profile(profile()).with_disk(DISK, SIXTEEN_BIT)
    request = PlanRequest(
        sub_groups=placed, unit_sizes=(5 * MILLION,), cost=cost, budgets=Budgets(gpu_bytes=0), windows=Windows()
    )
    planned = request.plan().planned
    bound = work_bound(planned.plan.workload, cost, 0)
    numel = planned.plan.workload.on_disk_numel
    assert bound.binding is Resource.DISK
    assert bound.seconds == pytest.approx(12 * numel / 6e9 + 12 * numel / 4e9)
    assert bound.seconds <= planned.update_s <= 1.3 * bound.seconds


def test_reads_in_backward_and_writes_after_forward_are_hidden() -> None:
    placed = place_on_disk([LAYERS, NORMS], SIXTEEN_BIT, 0)
    cost = CostModel.from_profile(profile()).with_disk(DISK, SIXTEEN_BIT)

    def exposed_s(windows: Windows) -> float:
        request = PlanRequest(
            sub_groups=placed, unit_sizes=(5 * MILLION,), cost=cost, budgets=Budgets(gpu_bytes=0), windows=windows
        )
        return request.plan().planned.exposed_s

    # Each of the three slots holds two layers.
    unit_bytes = 12 * 8 * MILLION
    alone_s, overlapped_s = exposed_s(Windows()), exposed_s(Windows(backward_s=5.0, forward_s=0.001))
    assert 3 * unit_bytes / 6e9 < alone_s - overlapped_s < 3 * unit_bytes / 6e9 + 3 * unit_bytes / 4e9


def test_a_profile_with_rates_of_disks_has_them() -> None:
    rates = {"disk_read_bytes_per_s": 6e9, "disk_write_bytes_per_s": 5e9, "disk_both_bytes_per_s": 7e9}
    found = profile({**RATES, **rates})
    assert DiskRates.from_profile(found) == DiskRates(6e9, 5e9, 7e9)
    assert DiskRates.from_profile(profile()) is None
    assert json.loads(found.to_json())["measurements"]["disk_both_bytes_per_s"]["samples"] == [7e9]
    assert isinstance(found.measurements["disk_read_bytes_per_s"], Measurement)
