"""An update writes to states that DataStates still saves. A stand-in for its engine keeps references to them."""

import sys
import tempfile
from types import SimpleNamespace

import deepspeed
import torch

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW"},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    "datastates_ckpt": {},
}


class InBackground:
    def __init__(self, config, rank):
        self.states, self.waits = [], 0

    def save(self, states, path):  # It returns immediately. The states are read until wait() returns.
        self.states.append(states)

    def wait(self, persist):
        self.waits += 1


if __name__ == "__main__":
    sys.modules["datastates"] = SimpleNamespace(CheckpointEngine=InBackground)
    engine, *_ = deepspeed.initialize(model=torch.nn.Linear(8, 8), config=CONFIG)
    writer = engine.checkpoint_engine.ckpt_engine
    for step in (1, 2):
        engine.backward(engine(torch.ones(1, 8)).sum())
        engine.step()
        if step == 1:
            engine.save_checkpoint(tempfile.mkdtemp())
            saved = writer.states[-1]["optimizer_state_dict"]["fp32_flat_groups"][0]
            before = saved.clone()
    print(f"{writer.waits} waits; the fp32 weights that are being saved have changed: {not torch.equal(saved, before)}")
