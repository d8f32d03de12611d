"""Test that exchanges of units fill the memory that a plan leaves, and never exceed it."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from perf_model.prediction.lane_queues import CODES, Integers, encode
from perf_model.prediction.memory import TrainingSetup, memory_of
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Workload
from perf_model.search.fill import MemoryFiller
from perf_model.search.memory_check import MemoryCheck

CPU, STREAMED, RESIDENT = Placement.CPU, Placement.STREAMED, Placement.RESIDENT

NUMELS = (8_388_608, 10_485_760, 12_582_912)
"""Lengths of 32, 40 and 48 MiB in fp32, which the allocator does not round up."""


def fill(
    workload: Workload, placements: tuple[Placement, ...], num_slots: int, gpu_bytes: int, setup: TrainingSetup
) -> Integers:
    filler = MemoryFiller(workload, MemoryCheck(workload, gpu_bytes, setup), setup)
    free = [unit.index for unit in workload.units if unit.fixed is None]
    return filler.fill(encode([placements])[0], num_slots, free)


def taken_bytes(workload: Workload, placements: tuple[Placement, ...], num_slots: int, setup: TrainingSetup) -> int:
    return memory_of(UpdatePlan(workload=workload, placements=placements, num_slots=num_slots), setup).gpu_bytes


def test_longer_units_become_resident_if_shorter_ones_leave_memory() -> None:
    """Use memory for two units of 5 in which two of 4 are resident: only a pair of exchanges fills it."""
    workload = Workload.from_numels([4 * 2**21, 4 * 2**21, 5 * 2**21, 5 * 2**21])
    setup = TrainingSetup(accumulates=True)
    gpu_bytes = taken_bytes(workload, (CPU, CPU, RESIDENT, RESIDENT), 1, setup)
    codes = fill(workload, (RESIDENT, RESIDENT, CPU, CPU), 1, gpu_bytes, setup)
    assert codes.tolist() == encode([(CPU, CPU, RESIDENT, RESIDENT)])[0].tolist()


def test_a_unit_becomes_resident_alone_if_there_is_memory_for_it() -> None:
    workload = Workload.from_numels([4 * 2**21] * 3)
    setup = TrainingSetup(accumulates=True)
    gpu_bytes = taken_bytes(workload, (RESIDENT, RESIDENT, STREAMED), 1, setup)
    codes = fill(workload, (RESIDENT, CPU, STREAMED), 1, gpu_bytes, setup)
    assert codes.tolist() == encode([(RESIDENT, RESIDENT, STREAMED)])[0].tolist()


def test_the_nearest_units_are_exchanged() -> None:
    workload = Workload.from_numels([4 * 2**21, 5 * 2**21, 4 * 2**21, 4 * 2**21, 4 * 2**21])
    setup = TrainingSetup(accumulates=True)
    longer = (CPU, RESIDENT, CPU, CPU, CPU)
    for place in (0, 2, 4):
        shorter = tuple(RESIDENT if index == place else CPU for index in range(5))
        codes = fill(workload, shorter, 1, taken_bytes(workload, longer, 1, setup), setup)
        assert codes.tolist() == encode([longer])[0].tolist()


def test_exchanges_that_do_not_fit_leave_smaller_ones() -> None:
    """Check that a pair that needs longer slots, which are not counted in advance, does not end the filling."""
    lengths = [8 * 2**20, 9 * 2**20, 10 * 2**20, 12 * 2**20]
    workload = Workload.from_numels(lengths)
    setup = TrainingSetup(accumulates=True)
    before = (STREAMED, RESIDENT, CPU, CPU)
    gpu_bytes = taken_bytes(workload, before, 2, setup) + 112 * 2**20
    after = (CPU, CPU, RESIDENT, RESIDENT)
    assert taken_bytes(workload, after, 2, setup) <= gpu_bytes
    assert fill(workload, before, 2, gpu_bytes, setup).tolist() == encode([after])[0].tolist()


@given(
    st.lists(st.sampled_from(NUMELS), min_size=2, max_size=20),
    st.booleans(),
    st.integers(0, 2**30),
    st.integers(1, 3),
    st.integers(0, 2**32),
)
def test_filled_plans_fit_and_have_at_least_as_many_residents(
    numels: list[int], accumulates: bool, left_bytes: int, num_slots: int, seed: int
) -> None:
    rng = random.Random(seed)
    placements = tuple(rng.choice(tuple(Placement)) for _ in numels)
    fixed = tuple(placement if rng.random() < 0.3 else None for placement in placements)
    units = Workload.from_numels(numels).units
    workload = Workload(tuple(replace(unit, fixed=placement) for unit, placement in zip(units, fixed, strict=True)))
    setup = TrainingSetup(accumulates=accumulates)
    gpu_bytes = taken_bytes(workload, placements, num_slots, setup) + left_bytes
    codes = fill(workload, placements, num_slots, gpu_bytes, setup)
    filled = tuple(list(Placement)[code] for code in codes.tolist())
    assert taken_bytes(workload, filled, num_slots, setup) <= gpu_bytes
    before, after = (np.array(numels)[encoded == CODES[RESIDENT]].sum() for encoded in (encode([placements])[0], codes))
    assert after >= before
    for unit, placement in zip(workload.units, filled, strict=True):
        assert unit.fixed in (None, placement)
    on_cpu = [unit for unit in workload.units if unit.fixed is None and filled[unit.index] is CPU]
    for unit in on_cpu:
        more = tuple(RESIDENT if index == unit.index else placement for index, placement in enumerate(filled))
        assert taken_bytes(workload, more, num_slots, setup) > gpu_bytes
