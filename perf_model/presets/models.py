"""Define the shapes of the models of the Deep Optimizer States paper, and of a few common ones."""

from __future__ import annotations

from typing import Any

from perf_model.training_run.decoder import gpt, llama
from perf_model.training_run.model import ModelShape

_PAPER_VOCAB = 51_200
"""The vocabulary of GPT-2, padded as in Megatron-LM. The logs of the runs do not contain it."""


def paper_model(name: str, layers: int, hidden: int, heads: int, numel: float) -> ModelShape:
    """Return a GPT with the sizes in the logs of the paper's artifact.

    The width of the feed-forward follows from them. The runs trained Llama-like models, which differ in the cuts and by
    a few percent in activations.
    """
    shape = gpt(name, layers=layers, hidden=hidden, heads=heads, vocab=_PAPER_VOCAB, positions=0)
    missing = (numel - shape.numel) / layers
    width = shape.intermediate + round(missing / (2 * hidden + 1))
    return gpt(name, layers, hidden, heads, _PAPER_VOCAB, positions=0, intermediate=width)


_LLAMA: dict[str, Any] = {"kv_heads": 8, "head_dim": 128, "vocab": 128256}
_QWEN: dict[str, Any] = {"kv_heads": 4, "head_dim": 128, "vocab": 152064, "qkv_bias": True}

MODELS: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        paper_model("7B", layers=32, hidden=4096, heads=32, numel=5.92e9),
        paper_model("8.3B", layers=72, hidden=3072, heads=32, numel=9.14e9),
        paper_model("10B", layers=50, hidden=4096, heads=32, numel=9.92e9),
        paper_model("13B", layers=40, hidden=5120, heads=40, numel=11.25e9),
        paper_model("20B", layers=40, hidden=5120, heads=64, numel=15.33e9),
        llama("Llama-3-8B", **_LLAMA, layers=32, hidden=4096, heads=32, intermediate=14336),
        llama("Qwen2.5-7B", **_QWEN, layers=28, hidden=3584, heads=28, intermediate=18944),
        llama("Llama-3-70B", **_LLAMA, layers=80, hidden=8192, heads=64, intermediate=28672),
    )
}
