"""ZeRO-3 with offloading updates a parameter that got no gradient with the gradient of the step before."""

import deepspeed
import torch

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1.0, "betas": [0.0, 0.0], "weight_decay": 0.0}},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
}


class SometimesUsed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, inputs, both):
        output = self.first(inputs)
        return (output + self.second(inputs) if both else output).sum()


model = SometimesUsed()
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
for both in (True, False):
    before = deepspeed.utils.safe_get_full_fp32_param(model.second.weight).clone()
    engine.backward(engine(torch.ones(1, 8), both))
    engine.step()
    moved = deepspeed.utils.safe_get_full_fp32_param(model.second.weight) - before
    print(f"second layer used: {both}; its weights moved by {float(moved.abs().max()):.2f}")
