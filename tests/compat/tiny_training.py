"""Train a tiny model with stock and with the plugin on the CPU, and print a JSON list of the values that differ.

``installed.py`` starts this file as one rank, outside of the checkout.
"""

from __future__ import annotations

import json
from typing import Any

import deepspeed
import torch

BLOCK = {"placement": "stride", "update_stride": 2, "unit_size": 700}
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.01,
    "steps_per_print": 10**9,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.1}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "sub_group_size": 2000,
        "stage3_param_persistence_threshold": 50,
    },
}


def train(**block: Any) -> dict[str, bytes]:
    torch.manual_seed(17)
    first, second, last = torch.nn.Linear(19, 53), torch.nn.Linear(53, 61), torch.nn.Linear(61, 23)
    model = torch.nn.Sequential(first, torch.nn.GELU(), second, torch.nn.GELU(), last)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={**CONFIG, **block})
    optimizer = engine.optimizer
    assert bool(block) == hasattr(optimizer, "plan"), f"found {type(optimizer).__name__}"
    tensors = {}
    for step in range(12):
        loss = engine(torch.randn(4, 19).bfloat16()).float().square().mean()
        engine.backward(loss)
        engine.step()
        tensors[f"loss {step}"] = loss.detach()
    tensors["norm"] = torch.tensor([float(engine.get_global_grad_norm())])
    for index, master in enumerate(optimizer.fp32_partitioned_groups_flat):
        of_group = {"master": master, "parameters": optimizer.fp16_partitioned_groups_flat[index]}
        of_group |= {name: optimizer.state[master][name] for name in ("exp_avg", "exp_avg_sq")}
        tensors |= {f"{name} of sub-group {index}": tensor for name, tensor in of_group.items()}
    found = {name: tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}
    engine.destroy()
    return found


if __name__ == "__main__":
    deepspeed.init_distributed()
    stock, ours = train(), train(deep_optimizer_states=BLOCK)
    differences = [
        f"{name} differs" for name in sorted(stock.keys() | ours.keys()) if stock.get(name) != ours.get(name)
    ]
    print(json.dumps(differences), flush=True)
