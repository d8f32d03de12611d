"""Create an engine whose layers AutoTP divides unevenly between two ranks, and answer with the refusal."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch

from deep_opt_states.zero.start.unsupported import Unsupported
from tests.launch import answer
from tests.zero.process_group import process_group
from tests.zero.tensor_parallel.layouts import llama


def main() -> None:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        "tensor_parallel": {"autotp_size": 2},
        "deep_optimizer_states": {},
    }
    torch.manual_seed(3)
    model = llama(heads=6, key_value_heads=3, width=48)
    try:
        deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    except Unsupported as error:
        answer(f"Unsupported: {error}")


if __name__ == "__main__":
    with process_group():
        main()
