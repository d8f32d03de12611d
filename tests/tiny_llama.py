"""Define a small Llama of Hugging Face, for tests that need a real model or the names of its parameters."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY, WIDTH, INNER = 96, 32, 56


class LossOfCausalModel(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        self.config = model.config

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens, labels=tokens).loss


def tiny_llama(**changes: Any) -> LossOfCausalModel:
    """Return a Llama that returns its loss; ``changes`` are keys of ``LlamaConfig``."""
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        # PyTorch's fused attention for the CPU has other bits than the operators that run on the software GPU.
        "attn_implementation": "eager",
    }
    return LossOfCausalModel(LlamaForCausalLM(LlamaConfig(**{**shape, **changes})))
