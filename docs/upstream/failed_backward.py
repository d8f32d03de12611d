"""After a backward that an error has ended, for example for lack of memory, ZeRO-3 cannot train on."""

import deepspeed
import torch

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
}


class FailOnce(torch.autograd.Function):
    failures = 1

    @staticmethod
    def forward(context, tensor):
        return tensor.clone()

    @staticmethod
    def backward(context, gradient):
        if FailOnce.failures:
            FailOnce.failures = 0
            raise RuntimeError("out of memory")
        return gradient


model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
for _ in range(2):
    try:
        hidden = engine.module[1](FailOnce.apply(engine.module[0](torch.ones(1, 8))))
        engine.backward(hidden.sum())
        engine.step()
        print("the next step has trained")
    except (RuntimeError, AssertionError) as error:
        print(f"{type(error).__name__}: {error}")
