"""Train a model on the device, save a checkpoint, and print the memory of the process before and while it is saved.

The argument is the plugin's block as JSON. The memory of the device is a part of that of the process.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
from typing import Any

import deepspeed
import torch

from tests.launch import answer
from tests.software_gpu.plugged import plugged
from tests.software_gpu.ranks import software_process_group
from tests.zero.memory.process_memory_ranks import PeakMemory, wide_model
from tests.zero.on_accelerator import on_accelerator
from tests.zero.parity.split_numels import counted_splits

WIDTH, LAYERS = 1024, 24
NUMEL = WIDTH * WIDTH * LAYERS
STEPS = 2


def trained_engine(block: dict[str, Any]) -> Any:
    model, config = wide_model(WIDTH, LAYERS)
    config["deep_optimizer_states"] = block
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for _ in range(STEPS):
        loss = engine(on_accelerator(torch.ones(1, WIDTH, dtype=torch.bfloat16))).float().square().mean()
        engine.backward(loss)
        engine.step()
    return engine


def main(block: str) -> None:
    with plugged(), counted_splits() as splits, tempfile.TemporaryDirectory() as folder:
        engine = trained_engine(json.loads(block))
        assert sum(master.numel() for master in engine.optimizer.optimizer.state) == NUMEL
        gc.collect()
        with PeakMemory() as peak:
            engine.save_checkpoint(folder)
        answer({"before_bytes": peak.before_bytes, "peak_bytes": peak.bytes, "split": splits})
        engine.destroy()


if __name__ == "__main__":
    with software_process_group():
        main(sys.argv[1])
