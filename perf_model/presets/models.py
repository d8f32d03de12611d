"""Define the shapes of known models: those of the Deep Optimizer States paper, and a few common ones."""

from __future__ import annotations

from dataclasses import replace

from perf_model.training_run.model import ModelShape, gpt

_PAPER_VOCAB = 51_200
"""The vocabulary of GPT-2, padded as Megatron-LM does; the logs of the runs do not print it."""


def _paper_model(name: str, layers: int, hidden: int, heads: int, numel: float) -> ModelShape:
    """Return a model of the paper, with the layers, hidden size and heads that the logs of its artifact print.

    It has as many parameters as the logs print (``published_runs.csv``). Both agree only if the feed-forward width is
    not GPT's four times the hidden size; the width of the runs is not published.
    """
    shape = gpt(name, layers=layers, hidden=hidden, heads=heads, vocab=_PAPER_VOCAB, positions=0)
    missing = (numel - shape.numel) / layers
    return replace(shape, intermediate=shape.intermediate + round(missing / (2 * hidden + 1)))


def _llama(
    name: str, layers: int, hidden: int, heads: int, intermediate: int, vocab: int, qkv_bias: bool = False
) -> ModelShape:
    """Return a model like Llama: grouped-query attention with 8 (Qwen2.5-7B: 4) key-value heads of width 128."""
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=4 if qkv_bias else 8,
        head_dim=128,
        intermediate=intermediate,
        vocab=vocab,
        qkv_bias=qkv_bias,
    )


MODELS: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        _paper_model("7B", layers=32, hidden=4096, heads=32, numel=5.92e9),
        _paper_model("8.3B", layers=72, hidden=3072, heads=32, numel=9.14e9),
        _paper_model("10B", layers=50, hidden=4096, heads=32, numel=9.92e9),
        _paper_model("13B", layers=40, hidden=5120, heads=40, numel=11.25e9),
        _paper_model("20B", layers=40, hidden=5120, heads=64, numel=15.33e9),
        _llama("Llama-3-8B", layers=32, hidden=4096, heads=32, intermediate=14336, vocab=128256),
        _llama("Qwen2.5-7B", layers=28, hidden=3584, heads=28, intermediate=18944, vocab=152064, qkv_bias=True),
        _llama("Llama-3-70B", layers=80, hidden=8192, heads=64, intermediate=28672, vocab=128256),
    )
}
