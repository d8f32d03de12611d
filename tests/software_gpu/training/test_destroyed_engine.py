"""Test that a destroyed engine, and one whose parameters are offloaded, leave only stock's memory on the device.

The optimizer is still referenced when its engine is destroyed: DeepSpeed's hooks on the model often keep this
reference.
"""

from __future__ import annotations

import gc
from typing import Any
from unittest import mock

import pytest
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

from deep_opt_states.zero.start import planning
from perf_model.prediction.memory import MemoryKind
from tests.ranks import on_ranks
from tests.software_gpu import device
from tests.software_gpu.filled_gpu.growing_inputs import slow_profile
from tests.software_gpu.plugged import plugged
from tests.software_gpu.ranks import software_process_group
from tests.zero.parity.case import STREAMED, Case
from tests.zero.parity.training import closing_engine, shared_folder, train

RESIDENTS = {"placement": [{"match": "layers.[0-3].*", "states": "resident"}, {"match": "*", "states": "streamed"}]}

BLOCKS = (
    RESIDENTS,
    {**STREAMED, "unit_size": 100_000, "num_slots": 4},
    {"placement": "cpu"},
    {"placement": [{"match": "layers.0.*", "states": "resident"}, {"match": "*", "states": "planned"}]},
)


# The biases are persistent parameters, so that all units have several ranges.
CASE = Case(
    name="destroyed engine",
    blocks=BLOCKS,
    widths=(512,) * 6,
    sub_group_size=500_000,
    steps=4,
    zero={"stage3_param_persistence_threshold": 1000},
)


def left(block: dict[str, Any] | None) -> dict[str, Any]:
    """Return the block, the bytes that its destroyed engine leaves on the device, and those that it had reserved."""
    gc.collect()
    before = device.memory_allocated()
    with shared_folder() as folder, closing_engine(CASE, block) as engine:
        optimizer = engine.optimizer
        train(engine, CASE, folder)
        reserved_bytes = reserved_bytes_of(optimizer)
        gc.collect()
        trained_bytes = device.memory_allocated()
        engine.offload_states(include=[OffloadStateTypeEnum.lp_params])
        offloaded_bytes = device.memory_allocated()
        given_back_bytes = reserved_bytes - reserved_bytes_of(optimizer)
        engine.reload_states()
        reloaded_bytes = device.memory_allocated()
        train(engine, CASE, folder)
    del engine
    gc.collect()
    assert optimizer is not None, "the reference is kept until here"
    return {
        "block": block,
        "left_bytes": device.memory_allocated() - before,
        "reserved_bytes": reserved_bytes,
        "freed_by_offload_bytes": trained_bytes - offloaded_bytes,
        "given_back_bytes": given_back_bytes,
        "taken_by_reload_bytes": reloaded_bytes - offloaded_bytes,
    }


def reserved_bytes_of(optimizer: Any) -> int:
    """Return the bytes that the plugin has reserved on the device now; none with stock's optimizer."""
    device_of_plugin = getattr(optimizer, "accounting_device", None)
    reservations = [] if device_of_plugin is None else device_of_plugin.reserved
    return sum(each.count * each.each_bytes for each in reservations if each.kind is MemoryKind.ACCELERATOR)


ROUNDING_BYTES = 64 * 1024


@pytest.fixture(scope="module")
def memory() -> list[dict[str, Any]]:
    """Return the memory of stock, and of each block."""
    found: list[dict[str, Any]] = on_ranks(1, left_by_each, group=software_process_group)[0]
    return found


def left_by_each() -> list[dict[str, Any]]:
    no_measurement = mock.patch.object(planning, "quick_profile", return_value=slow_profile())
    with plugged(), no_measurement:
        return [left(block) for block in (None, *BLOCKS)]


pytestmark = pytest.mark.xdist_group("destroyed engines")


def test_a_destroyed_engine_leaves_no_memory_on_the_device_but_that_of_stock(memory: list[dict[str, Any]]) -> None:
    stock, *answers = memory
    assert [found["block"] for found in answers] == list(BLOCKS)
    for found in answers:
        assert found["left_bytes"] <= stock["left_bytes"] + ROUNDING_BYTES, found["block"]
    assert answers[0]["reserved_bytes"] > 16 * ROUNDING_BYTES, "the states of resident units would be noticed"


def test_offloaded_parameters_free_as_much_memory_as_with_stock(memory: list[dict[str, Any]]) -> None:
    stock, *answers = memory
    assert stock["freed_by_offload_bytes"] > 16 * ROUNDING_BYTES, "the parameters would be noticed"
    for found in answers:
        freed_bytes = found["freed_by_offload_bytes"] - found["given_back_bytes"]
        assert freed_bytes >= stock["freed_by_offload_bytes"] - ROUNDING_BYTES, found["block"]
        assert found["taken_by_reload_bytes"] <= stock["taken_by_reload_bytes"] + ROUNDING_BYTES, found["block"]


def test_offloaded_parameters_give_the_memory_of_the_planner_back(memory: list[dict[str, Any]]) -> None:
    planned = memory[-1]
    assert planned["given_back_bytes"] > 16 * ROUNDING_BYTES
