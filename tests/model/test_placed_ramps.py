"""Test that ramps are placed within the GPU memory, are known by their plans, and have neighbours with other shares."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from perf_model.prediction.lane_queues import CODES, encode
from perf_model.prediction.memory import DEFAULT_SETUP
from perf_model.schedule.placement import Placement
from perf_model.schedule.workload import Workload
from perf_model.search.memory_check import MemoryCheck
from perf_model.search.moves import MAX_BLOCK, draw_moves
from perf_model.search.placed_ramps import PlacedRamps, key_of
from perf_model.search.ramps import EVENLY, FIRST, LATE, Ramp, nearby

SHORT = 1_300_000
"""A length whose tensors share segments of the allocator, so that ``place_ramps`` can only estimate its memory."""

WORKLOAD = Workload.from_numels([SHORT] * 60 + [4 * 10**6] * 10)

RAMPS = [
    Ramp(
        num_slots=num_slots,
        slot_numel=4 * 10**6,
        long_on_cpu=False,
        resident_power=resident_power,
        cpu_share=cpu_share,
        cpu_power=LATE,
    )
    for num_slots in (1, 2)
    for resident_power in (FIRST, EVENLY)
    for cpu_share in (0.1, 0.3, 0.6)
]


def excess_bytes(gpu_bytes: int, *, tightly: bool) -> list[int]:
    """Return the bytes by which each of ``RAMPS`` exceeds the memory."""
    memory = MemoryCheck(WORKLOAD, gpu_bytes, DEFAULT_SETUP)
    plans = PlacedRamps(WORKLOAD, gpu_bytes, DEFAULT_SETUP, memory).place(RAMPS, tightly=tightly)
    found: list[int] = memory.excess_bytes(
        np.array([codes for codes, _ in plans]), np.array([num_slots for _, num_slots in plans])
    ).tolist()
    return found


def test_ramps_that_exceed_the_memory_are_placed_again_with_fewer_units_on_the_gpu() -> None:
    whole = 16 * WORKLOAD.numel
    limits = range(whole // 5, whole, whole // 50)
    loosely = [excess for limit in limits for excess in excess_bytes(limit, tightly=False)]
    tightly = [excess for limit in limits for excess in excess_bytes(limit, tightly=True)]
    exceeding = [excess > 0 for excess in loosely]
    assert sum(exceeding) >= 10, "the estimate is too small for some ramps"
    assert sum(excess > 0 for excess in tightly) <= 0.5 * sum(exceeding)
    for before, after, exceeds in zip(loosely, tightly, exceeding, strict=True):
        assert exceeds or after == before, "a plan that fits is kept"


def test_the_ramp_of_a_plan_is_the_one_that_it_was_placed_for_first() -> None:
    memory = MemoryCheck(WORKLOAD, None, DEFAULT_SETUP)
    placed = PlacedRamps(WORKLOAD, None, DEFAULT_SETUP, memory)
    # With unlimited memory every unit is resident, whatever the ramp.
    first, second, *_ = RAMPS
    plans = placed.place([first, second, replace(first, num_slots=2)])
    assert {codes.tobytes() for codes, _ in plans} == {np.full(70, CODES[Placement.RESIDENT]).tobytes()}
    assert [placed.ramp_of[key_of(plan)] for plan in plans] == [first, first, replace(first, num_slots=2)]


def test_ramps_nearby_differ_only_in_a_share_that_is_possible() -> None:
    ramp = replace(RAMPS[0], cpu_share=0.8)
    shares = [other.cpu_share for other in nearby(ramp)]
    assert [replace(other, cpu_share=0.8) for other in nearby(ramp)] == [ramp] * len(shares)
    assert len(set(shares)) == len(shares) >= 16
    assert min(shares) == pytest.approx(0.6)
    assert max(shares) == pytest.approx(1.0)
    assert ramp.cpu_share not in shares
    assert list(nearby(replace(ramp, cpu_share=0.0))) == []


def test_long_blocks_are_shifted_and_keep_their_placements() -> None:
    codes = encode([[Placement.CPU, Placement.STREAMED, Placement.STREAMED, Placement.RESIDENT] * 50])[0]
    moves = draw_moves(codes, range(200), (0, 1, 2), random.Random(0))
    long_ones = [move for _, move in zip(range(400), moves, strict=False) if len(move.indices) > MAX_BLOCK]
    assert len(long_ones) > 20
    assert max(len(move.indices) for move in long_ones) > 100
    for move in long_ones:
        before = codes[list(move.indices)]
        shifts = [np.roll(before, by).tolist() for by in (-2, -1, 1, 2)]
        assert list(move.codes) in shifts
