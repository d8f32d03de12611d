"""Gradients that the caller drops before they are complete are not part of any update.

The caller drops them with ``zero_grad`` before a step, or after a backward that failed before its end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from tests.ranks import ranks

WIDTH = 8
CPU, STREAMED = {"placement": "cpu"}, {"placement": "streamed"}


class DroppedGradientNet(torch.nn.Module):
    """Two layers, the second of which is not used in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.second = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, uses_second: bool) -> torch.Tensor:
        x = self.first(x)
        return self.second(x) if uses_second else x


class RaisesInBackward(torch.autograd.Function):
    """The identity, with a backward that raises."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of memory")


def make_engine(block: dict[str, Any] | None, accumulation: int = 1, **zero: Any) -> Any:
    torch.manual_seed(0)
    model = DroppedGradientNet()
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


def step_after_zero_grad(block: dict[str, Any], accumulation: int, abandons: bool) -> dict[str, Any]:
    """Return the results of a step, before which ``zero_grad`` abandons a backward if ``abandons``.

    The abandoned backward belongs to an incomplete window and uses the second layer. The backwards of the step do not.
    """
    engine = make_engine(block, accumulation)
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


def step_after_failed_backward(block: dict[str, Any] | None, drop: Callable[[Any], object] | None) -> Any:
    """Return the masters after a step, before which a backward has failed unless ``drop`` is None; or the error's name.

    DeepSpeed's bucket still contains gradients of the backward that raised.
    """
    # Gradients are reduced in the bucket's own memory, not in the memory of the parameters' gradients.
    engine = make_engine(block, reduce_scatter=False)
    if drop is not None:
        hook = engine.module.first.register_forward_hook(lambda _, __, output: RaisesInBackward.apply(output))
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.backward(engine(batch(1), True).sum())
        hook.remove()
        drop(engine)
    try:
        engine.backward(engine(batch(2), True).sum())
    except AssertionError:
        return "AssertionError"
    engine.step()
    masters = [safe_get_full_fp32_param(param).tolist() for param in engine.module.parameters()]
    engine.destroy()
    return masters


def drop_each_gradient(engine: Any) -> None:
    for param in engine.module.parameters():
        param.grad = None


DROPS: dict[str, Callable[[Any], object]] = {
    "nothing": lambda engine: None,
    "engine.zero_grad": lambda engine: engine.zero_grad(),
    "each gradient": drop_each_gradient,
}


@ranks(1)
def test_an_abandoned_window_of_gradients_is_not_applied() -> None:
    for accumulation in (2, 3):
        for block in (CPU, STREAMED):
            abandoned, undisturbed = (step_after_zero_grad(block, accumulation, abandons) for abandons in (True, False))
            assert abandoned == undisturbed, (accumulation, block)
            assert abandoned["updated with zero"]
            assert abandoned["norm"] > 0


@ranks(1)
def test_gradients_of_a_failed_backward_are_not_mixed_with_later_ones() -> None:
    undisturbed = step_after_failed_backward(None, None)
    for name, drop in DROPS.items():
        # The failed backward has left gradients in the bucket. Stock reduces them together with the next ones.
        assert step_after_failed_backward(None, drop) == "AssertionError", name
        for block in (CPU, STREAMED):
            assert step_after_failed_backward(block, drop) == undisturbed, (name, block)
