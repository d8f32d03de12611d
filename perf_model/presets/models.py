"""Define the shapes of the models of the Deep Optimizer States paper, and of a few common ones."""

from __future__ import annotations

from typing import Any

from perf_model.training_run.decoder import QKV, gpt, llama
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


_LLAMA_3: dict[str, Any] = {"kv_heads": 8, "head_dim": 128, "vocab": 128_256}
_QWEN_2: dict[str, Any] = {"head_dim": 128, "vocab": 152_064, "biases": QKV}
_QWEN_3: dict[str, Any] = {"head_dim": 128, "vocab": 151_936, "qk_norm": True}
_MISTRAL: dict[str, Any] = {"layers": 32, "hidden": 4096, "heads": 32, "head_dim": 128, "vocab": 32_000}
_EXPERTS: dict[str, Any] = {"intermediate": 8 * 768, "experts": 128, "experts_per_token": 8}
_GEMMA_2: dict[str, Any] = {"head_dim": 256, "vocab": 256_000, "tied": True, "norms_of_feed_forward": True}

MODELS: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        paper_model("7B", layers=32, hidden=4096, heads=32, numel=5.92e9),
        paper_model("8.3B", layers=72, hidden=3072, heads=32, numel=9.14e9),
        paper_model("10B", layers=50, hidden=4096, heads=32, numel=9.92e9),
        paper_model("13B", layers=40, hidden=5120, heads=40, numel=11.25e9),
        paper_model("20B", layers=40, hidden=5120, heads=64, numel=15.33e9),
        llama("Llama-2-7B", **_MISTRAL, kv_heads=32, intermediate=11008),
        llama("Llama-3-8B", **_LLAMA_3, layers=32, hidden=4096, heads=32, intermediate=14336),
        llama("Llama-3-70B", **_LLAMA_3, layers=80, hidden=8192, heads=64, intermediate=28672),
        llama("Mistral-7B", **_MISTRAL, kv_heads=8, intermediate=14336),
        llama("Qwen2.5-7B", **_QWEN_2, layers=28, hidden=3584, heads=28, kv_heads=4, intermediate=18944),
        llama("Qwen2.5-14B", **_QWEN_2, layers=48, hidden=5120, heads=40, kv_heads=8, intermediate=13824),
        llama("Qwen2.5-32B", **_QWEN_2, layers=64, hidden=5120, heads=40, kv_heads=8, intermediate=27648),
        llama("Qwen3-4B", **_QWEN_3, layers=36, hidden=2560, heads=32, kv_heads=8, intermediate=9728, tied=True),
        llama("Qwen3-8B", **_QWEN_3, layers=36, hidden=4096, heads=32, kv_heads=8, intermediate=12288),
        llama("Qwen3-30B-A3B", **_QWEN_3, **_EXPERTS, layers=48, hidden=2048, heads=32, kv_heads=4),
        llama("Gemma-2-9B", **_GEMMA_2, layers=42, hidden=3584, heads=16, kv_heads=8, intermediate=14336),
    )
}
