"""Create one engine per block (JSON arguments), train each for 5 steps, and print its plan and its comparison.

For a block that is refused, print the error instead.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from tests.launch import answer
from tests.zero.process_group import process_group


def main(blocks: list[str]) -> None:
    for block in blocks:
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "cpu"},
                "sub_group_size": 4000,
                "stage3_param_persistence_threshold": 0,
            },
            "deep_optimizer_states": json.loads(block),
        }
        try:
            engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        except Exception as error:  # noqa: BLE001 (the test reads the message)
            answer({"refused": f"{type(error).__name__}: {error}"})
            continue
        for _ in range(5):
            loss = engine(torch.ones(1, 64, dtype=torch.bfloat16)).float().square().mean()
            engine.backward(loss)
            engine.step()
        optimizer = engine.optimizer
        compared = optimizer.report.comparison()
        answer(
            {
                "placements": [placement.value for placement in optimizer.plan.placements],
                "compared": {row.name: [row.predicted_s, row.measured_s] for row in compared},
                "rank": dist.get_rank(),
            }
        )
        engine.destroy()


if __name__ == "__main__":
    with process_group():
        main(sys.argv[1:])
