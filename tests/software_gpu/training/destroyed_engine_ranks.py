"""Train on the device, destroy the engine, and answer how much memory is left while its optimizer is referenced.

DeepSpeed's hooks on the model often keep this reference. One answer per config block has the bytes that are left, and
those that the plugin had reserved on the device. The first answer is stock's.
"""

from __future__ import annotations

import gc
from typing import Any

from perf_model.prediction.memory import MemoryKind
from tests.launch import answer
from tests.software_gpu import device
from tests.software_gpu.plugged import plugged
from tests.software_gpu.ranks import software_process_group
from tests.zero.parity.case import SPLIT_MASTERS, STREAMED, Case
from tests.zero.parity.training import closing_engine, shared_folder, train

RESIDENTS = {"placement": ["resident", "resident", "streamed"]}
BLOCKS = (
    RESIDENTS,
    {**RESIDENTS, **SPLIT_MASTERS},
    {**STREAMED, "unit_size": 100_000, "num_slots": 4},
    {"placement": "cpu"},
)

# The biases are persistent parameters, so that all units have early ranges.
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
        reservations = [] if block is None else optimizer.accounting_device.reserved
        on_device = [each for each in reservations if each.kind is MemoryKind.ACCELERATOR]
    del engine
    gc.collect()
    assert optimizer is not None, "the reference is kept until here"
    return {
        "block": block,
        "left_bytes": device.memory_allocated() - before,
        "reserved_bytes": sum(each.count * each.each_bytes for each in on_device),
    }


if __name__ == "__main__":
    with software_process_group(), plugged():
        for each in (None, *BLOCKS):
            answer(left(each))
