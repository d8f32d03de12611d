"""Define a byte-level GPT in plain PyTorch, and training batches that need no download.

The text is the source code of the interpreter's own standard library. It needs no tokenizer, and gives the same batch
for the same ``(seed, step, rank)``.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256
MIN_TEXT_BYTES = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The dimensions of a model; by default it has 10.9 million parameters.

    ``context`` is the number of bytes that the model attends to. ``bias``: all layers but the last one have biases.
    """

    layers: int = 6
    width: int = 384
    heads: int = 6
    context: int = 128
    bias: bool = True


class Block(nn.Module):
    """A transformer block with pre-normalization.

    Attention and MLP each read a normalized copy of the residual stream, [batch, context, width], and add to it.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.attention_norm = nn.LayerNorm(shape.width, bias=shape.bias)
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=shape.bias)
        self.attention_out = nn.Linear(shape.width, shape.width, bias=shape.bias)
        self.mlp_norm = nn.LayerNorm(shape.width, bias=shape.bias)
        self.mlp_in = nn.Linear(shape.width, 4 * shape.width, bias=shape.bias)
        self.mlp_out = nn.Linear(4 * shape.width, shape.width, bias=shape.bias)

    def forward(self, stream: Tensor) -> Tensor:
        stream = stream + self.attention_out(self.attend(self.qkv(self.attention_norm(stream))))
        return stream + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(stream))))

    def attend(self, qkv: Tensor) -> Tensor:
        """Apply causal attention to ``qkv``, [batch, context, 3 * width], and return [batch, context, width]."""
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in qkv.chunk(3, dim=-1)
        )  # each [batch, heads, context, width / heads]
        return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)


class ByteGPT(nn.Module):
    """A GPT that predicts the next byte."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.byte_embedding = nn.Embedding(VOCABULARY, shape.width)
        self.position_embedding = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width, bias=shape.bias)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Embedding | nn.Linear):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy of ``targets`` given ``inputs``, both [batch, context], in nats per byte."""
        positions = torch.arange(inputs.shape[1], device=inputs.device)
        stream = self.byte_embedding(inputs) + self.position_embedding(positions)
        for block in self.blocks:
            stream = block(stream)
        logits = self.head(self.norm(stream))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class StdlibText:
    """The concatenated source code of the standard library's modules, as bytes.

    The constructor raises ``ValueError`` if there are too few source files.
    """

    def __init__(self) -> None:
        folder = Path(sysconfig.get_paths()["stdlib"])
        text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
        if len(text) < MIN_TEXT_BYTES:
            raise ValueError(
                f"The training text is the *.py files of the standard library, at least {MIN_TEXT_BYTES:,} bytes; "
                f"found {len(text):,} in {folder}.\n"
                f"Use a Python whose standard library is installed as source files, not only as a zip or as *.pyc."
            )
        self._text = np.frombuffer(text, dtype=np.uint8)

    def batch(self, *, seed: int, step: int, rank: int, batch_size: int, context: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, int64 [batch_size, context]. The target of a byte is the next byte."""
        starts = np.random.default_rng((seed, step, rank)).integers(len(self._text) - context, size=batch_size)
        windows = self._text[starts[:, None] + np.arange(context + 1)]
        bytes_ = torch.from_numpy(windows.astype(np.int64))
        return bytes_[:, :-1].contiguous(), bytes_[:, 1:].contiguous()
