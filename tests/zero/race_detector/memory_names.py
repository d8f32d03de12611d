"""Name the optimizer's memory for the findings."""

from __future__ import annotations

import torch

from deep_opt_states.zero.stage3 import DeepOptimizerStates_Stage3
from perf_model.schedule.placement import Placement
from tests.zero.race_detector.detector import Recorder

STATES = ("master", "exp_avg", "exp_avg_sq")


def name_memories(recorder: Recorder, optimizer: DeepOptimizerStates_Stage3) -> None:
    """Name the states, the slots, the gradient buffers and the buckets of ``optimizer``.

    Memory in the slab has the name of its sub-group, and memory on the accelerator that of its unit. Call this again
    after units have moved.
    """

    def name(tensor: torch.Tensor, words: str) -> None:
        recorder.memory(tensor).name = words

    memory, executor = optimizer._running.memory, optimizer._running.executor
    for index, tensors in enumerate(memory.sub_groups):
        for attribute in STATES:
            name(getattr(tensors, attribute), f"{attribute} of sub-group {index}")
        name(tensors.grad, f"gradient of sub-group {index}")
        # An fp32 model has no rounded parameters: its parameters are copied from the masters.
        if tensors.rounded is not None:
            name(tensors.rounded, f"rounded copy of sub-group {index}")
    for index, unit in enumerate(memory.units):
        if unit.placement is not Placement.CPU:
            name(unit.parts[0].grad, f"gradient of unit {index}")
        if unit.resident is not None:
            for attribute in STATES:
                name(getattr(unit.resident.states, attribute), f"resident {attribute} of unit {index}")
        for part in unit.parts:
            name(part.param, "16-bit parameters")
        if unit.packing is not None:
            name(unit.packing.on_host, "rounded persistent parameters")
            name(unit.packing.on_accelerator, "persistent parameters on the accelerator")
    for slot in executor._actions._slots:
        for attribute in STATES:
            name(getattr(slot, attribute), f"slot, {attribute}")
    if (staging := optimizer._gradients._staging) is not None:
        for buffer in staging._buffers:
            name(buffer, "staging buffer")
    for bucket in optimizer.ipg_buckets.values():
        name(bucket.buffer, "gradient bucket")
