"""ZeRO-3 with offloading adds the gradient of a step before, if the first micro-batch did not reach a parameter."""

import deepspeed
import torch

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
}


class PartlyUsed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, inputs, both):
        output = self.first(inputs)
        return (output + self.second(inputs) if both else output).sum()


model = PartlyUsed()
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
for step in ((True, True), (False, True)):
    for both in step:
        engine.backward(engine(torch.ones(1, 8), both))
        if engine.is_gradient_accumulation_boundary():
            found = float(deepspeed.utils.safe_get_full_grad(model.second.weight).max())
        engine.step()
    print(f"{sum(step)} of 2 micro-batches reach the layer: gradient {found:.1f}, expected {sum(step) / 2:.1f}")
