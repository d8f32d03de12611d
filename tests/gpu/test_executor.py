"""Test that the executor on CUDA streams gives the serial bits, and page-locks.

The updates consist of little but copies, so that a missing wait gives wrong numbers.
"""

from __future__ import annotations

import random
import resource
from collections.abc import Callable
from functools import partial

import pytest
import torch

from deep_opt_states.device.cuda import CudaDevice
from deep_opt_states.device.slab import HostMemoryError
from deep_opt_states.zero.start.node_share import check_locking
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan, place_all
from perf_model.schedule.workload import Workload
from tests.gpu.updates import is_right, random_model
from tests.runtime.moving import Model, MovingIteration, random_iterations


@pytest.mark.parametrize("seed", range(60))
def test_units_that_move_between_updates_give_the_serial_bits(seed: int) -> None:
    chance = random.Random(seed)
    model = random_model(chance)
    iterations = random_iterations(chance, model, 5, moves=seed % 4 > 0)
    assert is_right(model, iterations), f"{model}\n{iterations}"


def streamed(numels: list[int], num_slots: int) -> UpdatePlan:
    workload = Workload.from_numels(numels)
    return UpdatePlan(workload=workload, placements=place_all(workload, Placement.STREAMED), num_slots=num_slots)


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_equal_units_streamed_repeatedly_through_few_slots_give_the_serial_bits(num_slots: int) -> None:
    """Check that no action starts too early: it would read the previous unit's numbers, of equal shape."""
    model = Model(numels=(700_001,) * 8, persistent=[], grad_dtype=torch.bfloat16)
    iterations = [MovingIteration(plan=streamed(list(model.numels), num_slots))] * 10
    for _ in range(3):
        assert is_right(model, iterations)


LIMIT_BYTES = 64 * 2**10
STATES_BYTES = 64 * 2**20


def is_refused(lock: Callable[[], object]) -> bool:
    try:
        lock()
    except HostMemoryError:
        return True
    return False


def test_a_trial_slightly_above_the_limit_predicts_whether_the_states_can_be_page_locked() -> None:
    device, (soft, hard) = CudaDevice(0), resource.getrlimit(resource.RLIMIT_MEMLOCK)
    trial = partial(check_locking, STATES_BYTES, STATES_BYTES // 16, device, LIMIT_BYTES)
    # A soft limit may be raised again.
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (LIMIT_BYTES, hard))
    try:
        # Repeat it, because the trial must release its memory.
        for _ in range(3):
            states = device.host_slab(STATES_BYTES)
            assert is_refused(trial) == is_refused(states.lock)
            states.close()
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))
