"""Activation checkpointing with ``cpu_checkpointing`` loses the inputs on the CPU accelerator.

The copy in host memory is the tensor itself (``checkpointing.py``, ``get_cpu_activations_for_backward``).
"""

import deepspeed
import torch

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW"},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
}


class RecomputedLayer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, inputs):
        return deepspeed.checkpointing.checkpoint(self.layer, inputs).square().sum()


if __name__ == "__main__":
    deepspeed.init_distributed()
    for in_cpu in (False, True):
        deepspeed.checkpointing.configure(None, num_checkpoints=1, checkpoint_in_cpu=in_cpu)
        model = RecomputedLayer()
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
        loss = engine(torch.ones(1, 8, requires_grad=True))
        try:
            engine.backward(loss)
            print(f"cpu_checkpointing {in_cpu}: backward has ended")
        except RuntimeError as error:
            print(f"cpu_checkpointing {in_cpu}: {type(error).__name__}: {error}")
