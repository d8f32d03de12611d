"""What trains: the model, its text and how much of it a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from examples.byte_gpt import ByteGPT, Shape

LARGEST_SLOT = 100_000_000
"""Parameters."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """``context`` bytes a sequence; ``micro_batch`` sequences, ``accumulation`` of them a step."""

    layers: int
    width: int
    context: int
    micro_batch: int
    accumulation: int = 1
    sub_group_size: int = 100_000_000

    @property
    def shape(self) -> Shape:
        return Shape(layers=self.layers, width=self.width, heads=self.width // 64, context=self.context)

    @property
    def parameters(self) -> int:
        with torch.device("meta"):
            return sum(param.numel() for param in ByteGPT(self.shape).parameters())

    @property
    def config(self) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": self.micro_batch,
            "gradient_accumulation_steps": self.accumulation,
            "steps_per_print": 10**9,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
            "zero_optimization": {"sub_group_size": self.sub_group_size},
        }

    @property
    def accelerator_bytes(self) -> int:
        """What arms that update on the accelerator may take of it beside the model: two slots of a sub-group, and the
        16-bit gradients of all parameters. No more for slots of larger sub-groups: not all states, with which there
        would be no offload."""
        slots = 2 * 12 * min(self.sub_group_size, self.parameters, LARGEST_SLOT)
        return slots + 2 * self.parameters

    @property
    def flops(self) -> float:
        """Of a step, of one rank: 6 a parameter and token, and attention's (arXiv 2204.02311, appendix B)."""
        attention = 12 * self.layers * self.width * self.context
        return self.tokens * (6 * self.parameters + attention)

    @property
    def tokens(self) -> int:
        """Of a step, of one rank."""
        return self.context * self.micro_batch * self.accumulation
