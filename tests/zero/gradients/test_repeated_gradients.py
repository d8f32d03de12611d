"""A gradient that is reduced several times per backward is summed: reentrant checkpointing of a shared layer.

The expected results are stock's for the same model without activation checkpointing: there autograd sums the
gradients of all uses of a parameter before DeepSpeed receives them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad
from torch.utils.checkpoint import checkpoint

from tests.ranks import ranks
from tests.tiers import thorough
from tests.zero.parity.training import Block, Record, collect

WIDTH, TOKENS, USES = 14, 11, 4
LARGE, SMALL, ONE_ELEMENT = 100_000, 300, 1
"""Bucket sizes. When a gradient arrives again, the previous one is still in the bucket: always, sometimes, or never."""

STEPS = 3


class SharedLayer(torch.nn.Module):
    """One layer that is used several times."""

    def __init__(self, recomputed: bool) -> None:
        super().__init__()
        layer = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())
        self.embed = torch.nn.Embedding(TOKENS, WIDTH)
        self.layers = torch.nn.ModuleList([layer] * USES)
        self.head = torch.nn.Linear(WIDTH, TOKENS)
        self._recomputed = recomputed

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True) if self._recomputed else layer(x)
        return self.head(x)


class TiedEmbeddings(torch.nn.Module):
    """A model whose embedding and head share a weight; both are in checkpointed segments."""

    def __init__(self, recomputed: bool) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(TOKENS, WIDTH)
        self.layer = torch.nn.Linear(WIDTH, WIDTH)
        self.head = torch.nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.embed.weight
        self._recomputed = recomputed

    def first(self, tokens: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(self.embed(tokens) + offset))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        # Autograd differentiates a reentrant segment only if one of its inputs requires a gradient.
        offset = torch.zeros(WIDTH, requires_grad=True)
        if not self._recomputed:
            return self.head(self.first(tokens, offset))
        return checkpoint(self.head, checkpoint(self.first, tokens, offset, use_reentrant=True), use_reentrant=True)


Model = Callable[[bool], torch.nn.Module]


@dataclass(frozen=True, kw_only=True)
class GradientVariant:
    model: str
    block: Block
    bucket: int
    accumulation: int = 1
    abandons: bool = False
    """Whether ``zero_grad`` abandons a backward before each step."""


MODELS: dict[str, Model] = {"shared layer": SharedLayer, "tied embeddings": TiedEmbeddings}
CPU, STREAMED = {"placement": "cpu"}, {"placement": "streamed"}

OURS = (
    *(
        GradientVariant(model="shared layer", block=block, bucket=bucket, accumulation=accumulation)
        for block in (CPU, STREAMED)
        for bucket in (LARGE, SMALL, ONE_ELEMENT)
        for accumulation in (1, 2)
    ),
    *(GradientVariant(model="tied embeddings", block=CPU, bucket=bucket) for bucket in (LARGE, ONE_ELEMENT)),
    GradientVariant(model="shared layer", block=CPU, bucket=ONE_ELEMENT, abandons=True),
)
OF_STOCK = (
    *(GradientVariant(model="shared layer", block=None, bucket=bucket) for bucket in (LARGE, SMALL, ONE_ELEMENT)),
    GradientVariant(model="tied embeddings", block=None, bucket=ONE_ELEMENT),
)


def train(variant: GradientVariant, recomputed: bool) -> dict[str, torch.Tensor]:
    """Return the gradients of every step and the final states, by name."""
    torch.manual_seed(3)
    model = MODELS[variant.model](recomputed)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": variant.accumulation,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "sub_group_size": 150,
            "stage3_param_persistence_threshold": 20,
            "reduce_bucket_size": variant.bucket,
        },
    }
    if variant.block is not None:
        config["deep_optimizer_states"] = variant.block
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def backward(micro_batch: int) -> None:
        generator = torch.Generator().manual_seed(100 * micro_batch + dist.get_rank())
        tokens = torch.randint(TOKENS, (2, 7), generator=generator)
        engine.backward(torch.nn.functional.cross_entropy(engine(tokens).flatten(0, 1), tokens.roll(1).flatten()))

    found = {}
    try:
        for step in range(STEPS):
            if variant.abandons:
                backward(1000 + step)
                engine.optimizer.zero_grad()
            for position in range(variant.accumulation):
                backward(step * variant.accumulation + position)
                if position < variant.accumulation - 1:
                    engine.step()
            for name, param in model.named_parameters():
                found[f"gradient of {name} in step {step}"] = safe_get_full_grad(param).clone()
            engine.step()
        record = Record()
        collect(engine.optimizer, record)
        return found | record.tensors
    finally:
        engine.destroy()


def expected_gradients(variant: GradientVariant) -> dict[str, torch.Tensor]:
    return train(replace(variant, block=None, bucket=LARGE, abandons=False), recomputed=False)


def relative_difference(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[name] - tensor).norm() / tensor.norm()) for name, tensor in expected.items())


@ranks(1, thorough(2))
def test_repeated_gradients_are_summed() -> None:
    for variant in OURS:
        expected, found = expected_gradients(variant), train(variant, recomputed=True)
        assert relative_difference(expected, found) < 1e-6, variant
        # The gradients of a window's second micro-batch are reduced one by one, and so are added to those of the first
        # micro-batch in another order.
        reordered = variant.accumulation > 1 and variant.bucket < 1000
        if dist.get_world_size() == 1 and not reordered:
            assert [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])] == [], variant


@ranks(1, thorough(2))
def test_stock_raises_or_loses_repeated_gradients() -> None:
    """Check why we deviate: when stock does neither, DeepSpeed has fixed it, and our deviation is to be removed."""
    for variant in OF_STOCK:
        if variant.bucket == ONE_ELEMENT:
            assert relative_difference(expected_gradients(variant), train(variant, recomputed=True)) > 0.1, variant
        else:
            with pytest.raises((AssertionError, AttributeError)):
                train(variant, recomputed=True)
