"""Name the optimizer's memory for the findings."""

from __future__ import annotations

import torch

from deep_opt_states.zero.stage3 import DeepOptimizerStates_Stage3
from tests.zero.race_detector.detector import Recorder


def name_memories(recorder: Recorder, optimizer: DeepOptimizerStates_Stage3) -> None:
    """Name the states, the slots, the gradient buffers and the buckets of ``optimizer``."""

    def name(tensor: torch.Tensor, words: str) -> None:
        recorder.memory(tensor).name = words

    for index, state in enumerate(optimizer._assembly.states):
        for attribute, words in {
            "master": "master",
            "exp_avg": "exp_avg",
            "exp_avg_sq": "exp_avg_sq",
            "grad": "gradient",
            "rounded": "rounded copy",
        }.items():
            # Only sub-groups that the CPU updates have a rounded copy.
            if (tensor := getattr(state, attribute)) is not None:
                name(tensor, f"{words} of sub-group {index}")
        name(state.param, "16-bit parameters")
    for slot in optimizer._assembly.executor._actions._slot_of.values():
        for attribute in ("master", "exp_avg", "exp_avg_sq"):
            name(getattr(slot, attribute), f"slot, {attribute}")
    early_update = optimizer._assembly.executor._early_update
    for tensor, words in ((early_update._grads, "gradients"), (early_update._rounded, "rounded copy")):
        if tensor is not None:
            name(tensor, f"{words} of early ranges")
    if (staging := optimizer._gradients._staging) is not None:
        for buffer in staging._buffers:
            name(buffer, "staging buffer")
    for bucket in optimizer.ipg_buckets.values():
        name(bucket.buffer, "gradient bucket")
