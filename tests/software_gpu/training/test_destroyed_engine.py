"""Test that a destroyed engine, and one whose parameters are offloaded, leave only stock's memory on the device."""

from __future__ import annotations

import gc
from typing import Any
from unittest import mock

from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

from deep_opt_states.zero.start import planning
from perf_model.prediction.memory import MemoryKind
from tests.ranks import ranks
from tests.software_gpu import device
from tests.software_gpu.filled_gpu.growing_inputs import slow_profile
from tests.software_gpu.plugged import plugged
from tests.software_gpu.ranks import software_process_group
from tests.zero.parity.case import Case
from tests.zero.parity.training import closing_engine, shared_folder, train

BLOCKS: tuple[dict[str, Any], ...] = (
    {"placement": [{"match": "layers.[0-3].*", "states": "resident"}, {"match": "*", "states": "streamed"}]},
    {"placement": "cpu"},
    {"placement": [{"match": "layers.0.*", "states": "resident"}, {"match": "*", "states": "planned"}]},
)

ROUNDING = 64 * 1024

# The biases are persistent parameters, so that all units have several ranges.
CASE = Case(
    name="destroyed engine",
    blocks=BLOCKS,
    widths=(512,) * 6,
    sub_group_size=500_000,
    steps=4,
    zero={"stage3_param_persistence_threshold": 1000},
)


def memory_of(block: dict[str, Any] | None) -> tuple[int, int, int, int]:
    """Return the bytes that an engine leaves, that reloading takes, and that offloading frees, of others and of us."""
    gc.collect()
    before = device.memory_allocated()
    with shared_folder() as folder, closing_engine(CASE, block) as engine:
        optimizer = engine.optimizer
        train(engine, CASE, folder)
        reserved = reserved_bytes_of(optimizer)
        gc.collect()
        trained = device.memory_allocated()
        engine.offload_states(include=[OffloadStateTypeEnum.lp_params])
        offloaded, given_back = device.memory_allocated(), reserved - reserved_bytes_of(optimizer)
        engine.reload_states()
        reloaded = device.memory_allocated()
        train(engine, CASE, folder)
    del engine
    gc.collect()
    assert optimizer is not None, "the reference is kept until here"
    left = device.memory_allocated() - before
    return left, reloaded - offloaded, trained - offloaded - given_back, given_back


def reserved_bytes_of(optimizer: Any) -> int:
    plugin = getattr(optimizer, "accounting_device", None)
    reservations = [] if plugin is None else plugin.reserved
    return sum(each.count * each.each_bytes for each in reservations if each.kind is MemoryKind.ACCELERATOR)


@ranks(1, group=software_process_group)
def test_a_destroyed_engine_and_offloaded_parameters_leave_as_little_memory_on_the_device_as_stock() -> None:
    no_measurement = mock.patch.object(planning, "quick_profile", return_value=slow_profile())
    with plugged(), no_measurement:
        stock, *found = (memory_of(block) for block in (None, *BLOCKS))
    for block, (left, taken, freed, _) in zip(BLOCKS, found, strict=True):
        assert left <= stock[0] + ROUNDING, block
        assert taken <= stock[1] + ROUNDING, block
        assert freed >= stock[2] - ROUNDING, block
    # What is compared would be noticed: the parameters, and the memory of the planner.
    assert min(stock[2], found[-1][-1]) > 16 * ROUNDING
