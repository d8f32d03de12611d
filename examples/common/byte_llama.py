"""Define a small Hugging Face causal LM with the shape of Llama and random weights, and a dataset for it.

The examples with a framework use it. ``byte_gpt`` provides the text.
"""

from __future__ import annotations

import torch
from common.byte_gpt import VOCABULARY, StdlibText
from torch import Tensor
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

CONTEXT = 64
SEED = 17


def byte_llama() -> PreTrainedModel:
    """Create the model, with 3 million parameters that are the same on every rank and in every run."""
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        use_cache=False,
    )
    return AutoModelForCausalLM.from_config(config)


class ByteWindows(Dataset[dict[str, Tensor]]):
    """A dataset of ``length`` pieces of the standard library's source code with ``CONTEXT`` tokens, one per byte."""

    def __init__(self, length: int) -> None:
        self._text = StdlibText()
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        inputs, _ = self._text.batch(seed=SEED, step=index, rank=0, batch_size=1, context=CONTEXT)
        # The model itself shifts the labels: it compares its prediction for a byte with the next byte.
        return {"input_ids": inputs[0], "labels": inputs[0]}
