"""Define a dense model that is known only by its number of parameters: ``--params``."""

from __future__ import annotations

from perf_model.training_run.families.decoder import (
    DecoderWidths,
    attention,
    decoder,
    feed_forward,
    norm,
    norms,
    vector,
)
from perf_model.training_run.families.dense import BEFORE_EACH
from perf_model.training_run.model import MAX_PARAMETERS, MAX_SIZES, ModelError, ModelShape, require_integer

MIN_PARAMETERS = 10**8
"""The least number of parameters: in smaller models, the vocabulary decides."""

HEAD_DIM, SMALL_HEAD_DIM = 128, 64
"""The head dimensions of Llama 3 from 8B on, and of Llama 3.2 1B: used below a width of ``LARGE_HIDDEN``."""

LARGE_HIDDEN = 4096
KV_HEADS = 8
"""The number of heads is a multiple of it, so that tensor-parallel ranks can divide them."""

HIDDEN_PER_LAYER = 128
"""The quotient of width and layers: 128 for Llama 3 8B, 102 for 70B, 130 for 405B."""

LARGE_PARAMETERS = 4 * 10**9
"""The number of parameters above which the models of Llama 3, Qwen 2.5 and Qwen 3 do not tie their embeddings."""

VOCAB, SMALL_VOCAB = 128_256, 50_304
"""The vocabularies of Llama 3, and of GPT-2 rounded up: used below 1e9 parameters."""


def generic_model(numel: int, layers: int | None = None, hidden: int | None = None) -> ModelShape:
    """Return a dense model like Llama with exactly ``numel`` parameters.

    ``layers`` and ``hidden`` are plausible for this number by default; the width of the feed-forward follows. The last
    few parameters, which no width divides, are a vector ``model.rest``. Raise ``ModelError`` if no such model exists.
    """
    require_integer("--params", numel, MIN_PARAMETERS, MAX_PARAMETERS, "Correct --params.")
    for key, value in {"layers": layers, "hidden": hidden}.items():
        if value is not None:
            require_integer(f"--{key}", value, 1, MAX_SIZES[key], f"Correct --{key}.")
    layers, hidden = _layers_and_hidden(numel, layers, hidden)
    head_dim = _head_dim(hidden)
    heads = max(1, hidden // head_dim)
    tied = numel < LARGE_PARAMETERS
    vocab = VOCAB if numel >= 10**9 else SMALL_VOCAB
    widths = DecoderWidths(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=KV_HEADS if heads % KV_HEADS == 0 else heads,
        head_dim=head_dim,
        intermediate=1,
        vocab=vocab,
    )
    outside = (1 if tied else 2) * vocab * hidden + hidden
    of_layer = [*attention(widths), *norms(BEFORE_EACH, hidden)]
    left = numel - outside - layers * sum(tensor.numel for tensor in of_layer)
    intermediate, rest = divmod(left, layers * 3 * hidden)
    if not 1 <= intermediate <= MAX_SIZES["intermediate"]:
        needed = numel - left + layers * 3 * hidden
        found = f"{numel:,} for {layers} layers of width {hidden:,}, which have {needed:,} or more"
        rule = (
            "must leave some parameters to the feed-forward" if intermediate < 1 else "needs more layers, or wider ones"
        )
        raise ModelError(f"--params: {rule}, found {found}.\nCorrect --layers or --hidden.")
    # Up to 3 * layers further columns: the first layers are wider by one.
    wider, rest = divmod(rest, 3 * hidden)

    return decoder(
        f"{numel / 1e9:.10g}B",
        widths,
        lambda number: [
            *of_layer[: len(of_layer) - 2],
            *feed_forward(hidden, intermediate + (number < wider)),
            *of_layer[len(of_layer) - 2 :],
        ],
        last_norm=[*norm("model.norm", hidden), *([vector("model.rest", rest)] if rest else [])],
        tied=tied,
        active_intermediate=intermediate,
        source=(
            f"a generic dense model with {layers} layers of width {hidden:,}, feed-forwards of {intermediate:,} and a "
            f"vocabulary of {vocab:,}; --layers and --hidden change it"
        ),
    )


def _layers_and_hidden(numel: int, layers: int | None, hidden: int | None) -> tuple[int, int]:
    """Return layers and width: a layer has about 12 * hidden ** 2 parameters (arXiv 2104.04473, equation 2)."""
    if layers is None and hidden is None:
        layers = round((numel / (12 * HIDDEN_PER_LAYER**2)) ** (1 / 3))
    if layers is None:
        assert hidden is not None
        return max(1, min(MAX_SIZES["layers"], round(numel / (12 * hidden**2)))), hidden
    if hidden is None:
        width = (numel / (12 * layers)) ** 0.5
        step = KV_HEADS * _head_dim(width)
        hidden = min(MAX_SIZES["hidden"], max(1, round(width / step)) * step)
    return layers, hidden


def _head_dim(hidden: float) -> int:
    return HEAD_DIM if hidden >= LARGE_HIDDEN else SMALL_HEAD_DIM
