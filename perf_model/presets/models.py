"""Define the shapes of known models: those of the Deep Optimizer States paper, and a few common ones."""

from __future__ import annotations

from perf_model.training_run.decoder import gpt, llama
from perf_model.training_run.model import ModelShape

_PAPER_VOCAB = 51_200
"""The vocabulary of GPT-2, padded as Megatron-LM does; the logs of the runs do not print it."""


def paper_model(name: str, layers: int, hidden: int, heads: int, numel: float) -> ModelShape:
    """Return a model of the paper, with the layers, hidden size and heads that the logs of its artifact print.

    It has as many parameters as the logs print (``published_runs.csv``), with the feed-forward width that this takes.
    The runs trained Llama-like models, whose feed-forward is gated; ``benchmarks/published`` cuts their sub-groups.
    GPT's differ from them in the cuts and by a few percent in activations, and plans for these names stay comparable.
    """
    shape = gpt(name, layers=layers, hidden=hidden, heads=heads, vocab=_PAPER_VOCAB, positions=0)
    missing = (numel - shape.numel) / layers
    width = shape.intermediate + round(missing / (2 * hidden + 1))
    return gpt(name, layers, hidden, heads, _PAPER_VOCAB, positions=0, intermediate=width)


def _llama(
    name: str,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    *,
    intermediate: int,
    vocab: int,
    qkv_bias: bool = False,
) -> ModelShape:
    return llama(
        name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads,
        intermediate=intermediate,
        vocab=vocab,
        qkv_bias=qkv_bias,
    )


MODELS: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        paper_model("7B", layers=32, hidden=4096, heads=32, numel=5.92e9),
        paper_model("8.3B", layers=72, hidden=3072, heads=32, numel=9.14e9),
        paper_model("10B", layers=50, hidden=4096, heads=32, numel=9.92e9),
        paper_model("13B", layers=40, hidden=5120, heads=40, numel=11.25e9),
        paper_model("20B", layers=40, hidden=5120, heads=64, numel=15.33e9),
        _llama("Llama-3-8B", 32, 4096, 32, 8, intermediate=14336, vocab=128256),
        _llama("Qwen2.5-7B", 28, 3584, 28, 4, intermediate=18944, vocab=152064, qkv_bias=True),
        _llama("Llama-3-70B", 80, 8192, 64, 8, intermediate=28672, vocab=128256),
    )
}
