"""Backwards whose gradients the caller drops: by ``zero_grad`` before a step, or because a backward raised half way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from tests.launch import answer
from tests.zero.process_group import process_group

WIDTH = 8
CPU, STREAMED = {"placement": "cpu"}, {"placement": "streamed"}


class Net(torch.nn.Module):
    """Two layers, of which the second is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.second = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, uses_second: bool) -> torch.Tensor:
        x = self.first(x)
        return self.second(x) if uses_second else x


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of memory")


def engine_of(block: dict[str, Any] | None, accumulation: int = 1, **zero: Any) -> Any:
    torch.manual_seed(0)
    model = Net()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "steps_per_print": 10**9,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "sub_group_size": WIDTH * WIDTH + WIDTH,
            **zero,
        },
    }
    if block is not None:
        config["deep_optimizer_states"] = block
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


def batch(seed: int) -> torch.Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed))


def zero_grad_before_a_step(block: dict[str, Any], accumulation: int, abandons: bool) -> dict[str, Any]:
    """The abandoned backward, of a window that is not complete, reaches the second layer; those of the step do not."""
    engine = engine_of(block, accumulation)
    engine.backward(engine(batch(1), True).sum())
    for position in range(accumulation - 1):
        engine.step()
        engine.backward(engine(batch(2 + position), True).sum())
    engine.step()
    if abandons:
        engine.backward(engine(batch(10), True).sum())
        engine.optimizer.zero_grad()
    for position in range(accumulation):
        engine.backward(engine(batch(20 + position), False).sum())
        if position < accumulation - 1:
            engine.step()
    before = safe_get_full_optimizer_state(engine.module.second.weight, "exp_avg").clone()
    engine.step()
    after = safe_get_full_optimizer_state(engine.module.second.weight, "exp_avg")
    found = {
        "norm": float(engine.get_global_grad_norm()),
        "updated with zero": torch.equal(after, before * torch.tensor(0.9)),
        "second": safe_get_full_fp32_param(engine.module.second.weight).tolist(),
    }
    engine.destroy()
    return found


def goes_on_after_a_backward_that_raised(block: dict[str, Any] | None, drop: Callable[[Any], object]) -> str:
    """Return what the next backward raises: DeepSpeed still has gradients of the one that raised in its bucket."""
    # Gradients are reduced in the bucket's own memory, and not where the parameters have them.
    engine = engine_of(block, reduce_scatter=False)
    hook = engine.module.first.register_forward_hook(lambda _, __, output: Raises.apply(output))
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.backward(engine(batch(1), True).sum())
    hook.remove()
    drop(engine)
    try:
        engine.backward(engine(batch(2), True).sum())
    except AssertionError:
        return "AssertionError"
    return ""


def drop_each(engine: Any) -> None:
    for param in engine.module.parameters():
        param.grad = None


DROPS: dict[str, Callable[[Any], object]] = {
    "engine.zero_grad": lambda engine: engine.zero_grad(),
    "each gradient": drop_each,
}


if __name__ == "__main__":
    with process_group():
        for accumulation in (2, 3):
            for block in (CPU, STREAMED):
                arms = [zero_grad_before_a_step(block, accumulation, abandons) for abandons in (True, False)]
                answer({"abandoned": arms[0], "undisturbed": arms[1]})
        for name, drop in DROPS.items():
            for arm in (None, CPU, STREAMED):
                answer({"drop": name, "block": arm, "raised": goes_on_after_a_backward_that_raised(arm, drop)})
