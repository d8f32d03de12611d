"""``DeepSpeedCPUAdam`` ignores ``maximize`` in a param group, and minimizes. PyTorch's AdamW maximizes."""

import deepspeed
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
}

if __name__ == "__main__":
    model = torch.nn.Linear(8, 8)
    # Accelerate replaces torch.optim.AdamW(..., maximize=True) by DeepSpeedCPUAdam with the same param groups.
    groups = torch.optim.AdamW(model.parameters(), lr=0.1, maximize=True).param_groups
    engine, *_ = deepspeed.initialize(model=model, optimizer=DeepSpeedCPUAdam(groups, lr=0.1), config=CONFIG)
    losses = []
    for _ in range(3):
        loss = engine(torch.ones(1, 8)).sum()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    print("maximize:", engine.optimizer.param_groups[0]["maximize"])
    print("the loss falls" if losses[2] < losses[1] < losses[0] else "the loss rises")
