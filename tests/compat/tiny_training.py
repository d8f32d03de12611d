"""Train a tiny model with stock and with the plugin on the CPU, and print the differences.

``installed.py`` starts this file as one rank, outside of the checkout. The last line of its output is a JSON list with
one line per difference.
"""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from typing import Any

import deepspeed
import torch

from deep_opt_states.names import CONFIG_KEY

WIDTHS = (19, 53, 61, 23)
STEPS = 6
ACCUMULATION = 2
BLOCK = {"placement": "stride", "update_stride": 2, "unit_size": 700}


def train(block: dict[str, Any] | None) -> dict[str, torch.Tensor]:
    """Return losses, norms, states and 16-bit parameters after some steps, with stock if ``block`` is None."""
    torch.manual_seed(17)
    layers = [torch.nn.Linear(*widths) for widths in pairwise(WIDTHS)]
    model = torch.nn.Sequential(*(module for layer in layers for module in (layer, torch.nn.GELU())))
    weights = [layer.weight for layer in layers]
    biases = [layer.bias for layer in layers]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=_config(block))
    losses, norms = [], []
    for step in range(STEPS):
        for micro_batch in range(ACCUMULATION):
            generator = torch.Generator().manual_seed(ACCUMULATION * step + micro_batch)
            x = torch.randn(4, WIDTHS[0], generator=generator).bfloat16().to(engine.device)
            loss = engine(x).float().square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        norms.append(float(engine.get_global_grad_norm()))
    found = {"losses": torch.stack(losses), "norms": torch.tensor(norms, dtype=torch.float64)}
    optimizer = engine.optimizer
    assert (block is not None) == hasattr(optimizer, "plan"), (
        f"{type(optimizer).__name__} is not the one that was meant"
    )
    for index, master in enumerate(optimizer.fp32_partitioned_groups_flat):
        state = optimizer.state[master]
        tensors = {"master": master, "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}
        tensors["parameters"] = optimizer.fp16_partitioned_groups_flat[index]
        found |= {f"{name} of sub-group {index}": tensor.detach().clone() for name, tensor in tensors.items()}
    engine.destroy()
    return found


def _config(block: dict[str, Any] | None) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": 0.01,
        "steps_per_print": 10**9,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "sub_group_size": 2000,
            "stage3_param_persistence_threshold": 50,
        },
    }
    return config if block is None else {**config, CONFIG_KEY: block}


def differences(stock: dict[str, torch.Tensor], ours: dict[str, torch.Tensor]) -> list[str]:
    """Return one line for each value that is not equal to the bit."""
    lines = [f"{name} exists with one of the two only" for name in sorted(stock.keys() ^ ours.keys())]
    for name in sorted(stock.keys() & ours.keys()):
        one, other = stock[name], ours[name]
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            lines.append(f"{name}: {one.dtype} {tuple(one.shape)} with stock, {other.dtype} {tuple(other.shape)}")
        elif count := int((_bits(one) != _bits(other)).sum()):
            lines.append(f"{name}: {count} of {one.numel()} values differ")
    return lines


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of each value as an integer: 0.0 differs from -0.0, and equal NaNs do not differ."""
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def main() -> None:
    """Print the differences between stock and the plugin."""
    deepspeed.init_distributed()
    found = differences(train(None), train(BLOCK))
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
