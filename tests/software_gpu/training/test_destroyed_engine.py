"""Test that a destroyed engine, and one whose parameters are offloaded, leave only stock's memory on the device.

The optimizer is still referenced when its engine is destroyed: DeepSpeed's hooks on the model often keep this
reference.
"""

from __future__ import annotations

import gc
from typing import Any, NamedTuple
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

# The biases are persistent parameters, so that all units have several ranges.
CASE = Case(
    name="destroyed engine",
    blocks=BLOCKS,
    widths=(512,) * 6,
    sub_group_size=500_000,
    steps=4,
    zero={"stage3_param_persistence_threshold": 1000},
)


class LeftMemory(NamedTuple):
    """The bytes on the device that an engine leaves, and that its parameters return and take again.

    ``reserved`` are reserved by the plugin, of which ``given_back`` go with the parameters.
    """

    left: int
    freed_by_offload: int
    taken_by_reload: int
    reserved: int
    given_back: int


def memory_of(block: dict[str, Any] | None) -> LeftMemory:
    gc.collect()
    before = device.memory_allocated()
    with shared_folder() as folder, closing_engine(CASE, block) as engine:
        optimizer = engine.optimizer
        train(engine, CASE, folder)
        reserved = reserved_bytes_of(optimizer)
        gc.collect()
        trained = device.memory_allocated()
        engine.offload_states(include=[OffloadStateTypeEnum.lp_params])
        offloaded = device.memory_allocated()
        given_back = reserved - reserved_bytes_of(optimizer)
        engine.reload_states()
        reloaded = device.memory_allocated()
        train(engine, CASE, folder)
    del engine
    gc.collect()
    assert optimizer is not None, "the reference is kept until here"
    left = device.memory_allocated() - before
    return LeftMemory(left, trained - offloaded, reloaded - offloaded, reserved, given_back)


def reserved_bytes_of(optimizer: Any) -> int:
    """Return the bytes that the plugin has reserved on the device now; none with stock's optimizer."""
    plugin = getattr(optimizer, "accounting_device", None)
    reservations = [] if plugin is None else plugin.reserved
    return sum(each.count * each.each_bytes for each in reservations if each.kind is MemoryKind.ACCELERATOR)


@ranks(1, group=software_process_group)
def test_a_destroyed_engine_and_offloaded_parameters_leave_no_memory_on_the_device_but_that_of_stock() -> None:
    rounding = 64 * 1024
    no_measurement = mock.patch.object(planning, "quick_profile", return_value=slow_profile())
    with plugged(), no_measurement:
        stock, *found = (memory_of(block) for block in (None, *BLOCKS))
    for block, memory in zip(BLOCKS, found, strict=True):
        assert memory.left <= stock.left + rounding, block
        assert memory.freed_by_offload - memory.given_back >= stock.freed_by_offload - rounding, block
        assert memory.taken_by_reload <= stock.taken_by_reload + rounding, block
    # What is compared would be noticed: the states of resident units, the parameters, and the memory of the planner.
    assert min(found[0].reserved, stock.freed_by_offload, found[-1].given_back) > 16 * rounding
