"""Train a tiny model with stock and with the plugin on the CPU, and print the differences.

``installed.py`` starts this file as one rank, outside of the checkout. The last line of its output is a JSON list with
one line per difference.
"""

from __future__ import annotations

import json
import sys
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


def train(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return losses, norm, states and 16-bit parameters after some steps."""
    torch.manual_seed(17)
    first, second, last = torch.nn.Linear(19, 53), torch.nn.Linear(53, 61), torch.nn.Linear(61, 23)
    model = torch.nn.Sequential(first, torch.nn.GELU(), second, torch.nn.GELU(), last)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    optimizer = engine.optimizer
    assert ("deep_optimizer_states" in config) == hasattr(optimizer, "plan"), f"found {type(optimizer).__name__}"
    losses = []
    for _ in range(12):
        loss = engine(torch.randn(4, 19).bfloat16()).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    found = {"losses": torch.stack(losses), "norm": torch.tensor([float(engine.get_global_grad_norm())])}
    for index, master in enumerate(optimizer.fp32_partitioned_groups_flat):
        tensors = {"master": master, "parameters": optimizer.fp16_partitioned_groups_flat[index]}
        tensors |= {name: optimizer.state[master][name] for name in ("exp_avg", "exp_avg_sq")}
        found |= {f"{name} of sub-group {index}": tensor.detach().clone() for name, tensor in tensors.items()}
    engine.destroy()
    return found


def differences(stock: dict[str, torch.Tensor], ours: dict[str, torch.Tensor]) -> list[str]:
    """Return one line for each value that is not equal to the bit: 0.0 differs from -0.0, equal NaNs do not differ."""
    lines = [f"{name} exists with one of the two only" for name in sorted(stock.keys() ^ ours.keys())]
    for name in sorted(stock.keys() & ours.keys()):
        one, other = stock[name], ours[name]
        same_bits = one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        lines += [] if same_bits else [f"{name} differs"]
    return lines


if __name__ == "__main__":
    deepspeed.init_distributed()
    found = differences(train(CONFIG), train({**CONFIG, "deep_optimizer_states": BLOCK}))
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
