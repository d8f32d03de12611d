"""Define a small model of equal layers that can share their parameters."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, TOKENS = 10, 13

Checkpointing = Literal["reentrant", "non-reentrant"]


class StackLayer(nn.Module):
    """A layer with a residual connection, [..., WIDTH] to the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Stack(nn.Module):
    """An embedding, ``num_layers`` layers in ``self.model.layers`` and a head; the forward returns the loss."""

    def __init__(self, num_layers: int, *, checkpointing: Checkpointing | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(StackLayer() for _ in range(num_layers))
        self.head = nn.Linear(WIDTH, TOKENS)
        self._checkpointing = checkpointing

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.model.layers:
            if self._checkpointing is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self._checkpointing == "reentrant")
        logits = self.head(x).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(1, dims=1).flatten())


def tokens(rank: int, micro_batch: int) -> torch.Tensor:
    """Return tokens of shape [2, 7], the same whenever rank and micro-batch are the same."""
    generator = torch.Generator().manual_seed(1000 * micro_batch + rank)
    return torch.randint(TOKENS, (2, 7), generator=generator)
