"""A small causal LM of Hugging Face's, shaped like Llama and initialised at random, and text to train it on.

For the examples that train with a framework; the text and its bytes are those of ``byte_gpt``.
"""

from __future__ import annotations

import torch
from byte_gpt import VOCABULARY, StdlibText
from torch import Tensor
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

CONTEXT = 64
SEED = 17


def byte_llama() -> PreTrainedModel:
    """3 million parameters, the same for every rank and in every run."""
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
    """``length`` pieces of the standard library's source code, ``CONTEXT`` bytes each; a byte is a token."""

    def __init__(self, length: int) -> None:
        self._text = StdlibText()
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        inputs, _ = self._text.batch(seed=SEED, step=index, rank=0, batch_size=1, context=CONTEXT)
        # The model itself compares what it says to a byte with the one after it.
        return {"input_ids": inputs[0], "labels": inputs[0]}
