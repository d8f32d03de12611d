"""ZeRO-3 loses gradients of a layer that is used several times under reentrant activation checkpointing."""

import deepspeed
import torch
from torch.utils.checkpoint import checkpoint

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": 1},
}


class RepeatedLayer(torch.nn.Module):
    def __init__(self, checkpointed):
        super().__init__()
        self.layer, self.head = torch.nn.Linear(14, 14), torch.nn.Linear(14, 11)
        self.checkpointed = checkpointed

    def forward(self, stream):
        for _ in range(4):
            stream = checkpoint(self.layer, stream, use_reentrant=True) if self.checkpointed else self.layer(stream)
        return self.head(stream).square().sum()


def gradient(checkpointed):
    torch.manual_seed(0)
    model = RepeatedLayer(checkpointed)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
    engine.backward(engine(torch.ones(1, 14, requires_grad=True)))
    return deepspeed.utils.safe_get_full_grad(model.layer.weight)


expected, found = gradient(checkpointed=False), gradient(checkpointed=True)
print(f"relative error of the gradient: {float((found - expected).norm() / expected.norm()):.2f}")
