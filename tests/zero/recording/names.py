"""What findings call the optimizer's memory."""

from __future__ import annotations

import torch

from deep_opt_states.zero.stage3 import DeepOptimizerStates_Stage3
from tests.zero.recording.recorder import Recorder


def name_memories(recorder: Recorder, optimizer: DeepOptimizerStates_Stage3) -> None:
    def name(tensor: torch.Tensor, words: str) -> None:
        recorder.memory(tensor).name = words

    for index, state in enumerate(optimizer._states):
        for attribute, words in {
            "master": "master",
            "exp_avg": "exp_avg",
            "exp_avg_sq": "exp_avg_sq",
            "grad": "gradient",
            "rounded": "rounded copy",
        }.items():
            # A rounded copy is there for CPU updates only.
            if (tensor := getattr(state, attribute)) is not None:
                name(tensor, f"{words} of sub-group {index}")
        name(state.param, "16-bit parameters")
    for slot in optimizer._executor._actions._slot_of.values():
        for attribute in ("master", "exp_avg", "exp_avg_sq"):
            name(getattr(slot, attribute), f"slot, {attribute}")
    first_parts = optimizer._executor._first_parts
    for tensor, words in ((first_parts._grads, "gradients"), (first_parts._rounded, "rounded copy")):
        if tensor is not None:
            name(tensor, f"{words} of first parts")
    if (staging := optimizer._gradients._staging) is not None:
        for buffer in staging._buffers:
            name(buffer, "staging buffer")
    for bucket in optimizer.ipg_buckets.values():
        name(bucket.buffer, "gradient bucket")
