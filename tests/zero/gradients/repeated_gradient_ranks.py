"""Train models whose gradients arrive several times per backward, and print the differences from the expected results.

The expected results are stock's for the same model without activation checkpointing: there autograd sums the gradients
of all uses of a parameter before DeepSpeed receives them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad
from torch.utils.checkpoint import checkpoint

from tests.launch import answer
from tests.zero.parity.training import Block, Record, collect
from tests.zero.process_group import process_group

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
VARIANTS = (
    *(
        GradientVariant(model="shared layer", block=block, bucket=bucket, accumulation=accumulation)
        for block in (CPU, STREAMED)
        for bucket in (LARGE, SMALL, ONE_ELEMENT)
        for accumulation in (1, 2)
    ),
    *(GradientVariant(model="tied embeddings", block=CPU, bucket=bucket) for bucket in (LARGE, ONE_ELEMENT)),
    GradientVariant(model="shared layer", block=CPU, bucket=ONE_ELEMENT, abandons=True),
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


def compare(variant: GradientVariant) -> dict[str, Any]:
    expected = train(
        GradientVariant(model=variant.model, block=None, bucket=LARGE, accumulation=variant.accumulation),
        recomputed=False,
    )
    try:
        found = train(variant, recomputed=True)
    except (AssertionError, AttributeError) as error:
        return {"raised": type(error).__name__}
    assert found.keys() == expected.keys()
    unequal = [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])]
    worst = max(float((found[name] - tensor).norm() / tensor.norm()) for name, tensor in expected.items())
    return {"raised": "", "unequal": unequal, "relative difference": worst}


if __name__ == "__main__":
    with process_group():
        for variant in VARIANTS:
            answer({**asdict(variant), **compare(variant)})
