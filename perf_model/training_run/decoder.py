"""Define dense decoders by a few numbers, for the presets and ``--params``. No config and no torch is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from perf_model.training_run.model import (
    MAX_PARAMETERS,
    MAX_SIZES,
    ModelError,
    ModelShape,
    ParameterShape,
    require_integer,
)

MIN_PARAMETERS = 10**8
"""The least number of parameters: in smaller models, the vocabulary decides."""

HEAD_DIM, SMALL_HEAD_DIM, LARGE_HIDDEN = 128, 64, 4096
"""The head dimension of Llama 3 8B, used from a width of ``LARGE_HIDDEN`` on, and of Llama 3.2 1B."""

KV_HEADS = 8
"""The number of heads is a multiple of it, so that tensor-parallel ranks can divide them."""

HIDDEN_PER_LAYER = 128
"""The quotient of width and layers: 128 for Llama 3 8B, 102 for 70B, 130 for 405B."""

LARGE_PARAMETERS = 4 * 10**9
"""The number of parameters above which the models of Llama 3, Qwen 2.5 and Qwen 3 do not tie their embeddings."""

VOCAB, SMALL_VOCAB = 128_256, 50_304
"""The vocabularies of Llama 3, and of GPT-2 rounded up: used below 1e9 parameters."""

Tensors = list[ParameterShape]


def llama(
    name: str,
    *,
    tied: bool = False,
    qkv_bias: bool = False,
    wider_layers: int = 0,
    rest: int = 0,
    source: str = "",
    **sizes: Any,
) -> ModelShape:
    """Return the shape of a Llama, or with ``qkv_bias`` of a Qwen 2. ``sizes`` are those of ``ModelShape``.

    The feed-forward of the first ``wider_layers`` is wider by one. ``rest`` is the length of a vector ``model.rest``.
    """
    hidden = sizes["hidden"]
    query, key_value = sizes["heads"] * sizes["head_dim"], sizes["kv_heads"] * sizes["head_dim"]

    def layer(number: int) -> Tensors:
        width = sizes["intermediate"] + (number < wider_layers)
        return [
            *_linear("self_attn.q_proj", hidden, query, bias=qkv_bias),
            *_linear("self_attn.k_proj", hidden, key_value, bias=qkv_bias),
            *_linear("self_attn.v_proj", hidden, key_value, bias=qkv_bias),
            *_linear("self_attn.o_proj", query, hidden),
            *_linear("mlp.gate_proj", hidden, width),
            *_linear("mlp.up_proj", hidden, width),
            *_linear("mlp.down_proj", width, hidden),
            _vector("input_layernorm.weight", hidden),
            _vector("post_attention_layernorm.weight", hidden),
        ]

    last = [_vector("model.norm.weight", hidden), *([_vector("model.rest", rest)] if rest else [])]
    return _decoder(name, sizes, layer, positions=[], last=last, tied=tied, source=source)


def gpt(
    name: str, layers: int, hidden: int, heads: int, vocab: int, positions: int, intermediate: int | None = None
) -> ModelShape:
    """Return a GPT as in the Megatron-LM paper: biases, tied embeddings, and a feed-forward of four times the width.

    ``positions`` is the number of learned position embeddings, 0 for rotary ones. ``intermediate`` is another width of
    the feed-forward. The parameters have names like those of Llama.
    """
    width = 4 * hidden if intermediate is None else intermediate
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": heads, "vocab": vocab}
    sizes |= {"head_dim": hidden // heads, "intermediate": width}
    of_layer = [
        *(tensor for part in "qkvo" for tensor in _linear(f"self_attn.{part}_proj", hidden, hidden, bias=True)),
        *_linear("mlp.up_proj", hidden, width, bias=True),
        *_linear("mlp.down_proj", width, hidden, bias=True),
        *_layer_norm("input_layernorm", hidden),
        *_layer_norm("post_attention_layernorm", hidden),
    ]
    learned = [_vector("model.embed_positions.weight", positions * hidden)] if positions else []
    last = _layer_norm("model.norm", hidden)
    return _decoder(name, sizes, lambda number: of_layer, positions=learned, last=last, tied=True)


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
    heads = max(1, hidden // _head_dim(hidden))

    sizes: dict[str, Any] = {"layers": layers, "hidden": hidden, "heads": heads, "head_dim": _head_dim(hidden)}
    sizes |= {"kv_heads": KV_HEADS if heads % KV_HEADS == 0 else heads}
    sizes |= {"vocab": VOCAB if numel >= 10**9 else SMALL_VOCAB}
    tied = numel < LARGE_PARAMETERS
    narrowest = llama("", **sizes, intermediate=1, tied=tied)
    more, rest = divmod(numel - narrowest.numel, layers * 3 * hidden)
    intermediate = 1 + more
    if not 1 <= intermediate <= MAX_SIZES["intermediate"]:
        found = f"{numel:,} for {layers} layers of width {hidden:,}, which have {narrowest.numel:,} or more"
        rule = "must leave some parameters to the feed-forward" if more < 0 else "needs more layers, or wider ones"
        raise ModelError(f"--params: {rule}, found {found}.\nCorrect --layers or --hidden.")
    # Up to 3 * layers further columns: the first layers are wider by one.
    wider_layers, rest = divmod(rest, 3 * hidden)
    source = (
        f"a generic dense model with {layers} layers of width {hidden:,}, feed-forwards of {intermediate:,} and a "
        f"vocabulary of {narrowest.vocab:,}; --layers and --hidden change it"
    )
    name = f"{numel / 1e9:.10g}B"
    sizes |= {"intermediate": intermediate}
    return llama(name, **sizes, tied=tied, wider_layers=wider_layers, rest=rest, source=source)


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


def _decoder(
    name: str,
    sizes: dict[str, Any],
    layer: Callable[[int], Tensors],
    *,
    positions: Tensors,
    last: Tensors,
    tied: bool,
    source: str = "",
) -> ModelShape:
    """Return the decoder with the parameters ``layer(i)`` in layer ``i``. ``tied``: the head has those of the table."""
    hidden, vocab, heads = sizes["hidden"], sizes["vocab"], sizes["heads"]
    table = ParameterShape("model.embed_tokens.weight", vocab * hidden, vocab * hidden, tied)
    of_layers = [
        tensor._replace(name=f"model.layers.{number}.{tensor.name}")
        for number in range(sizes["layers"])
        for tensor in layer(number)
    ]
    head = _linear("lm_head", hidden, vocab)
    return ModelShape(
        name=name,
        **sizes,
        scores_width=sizes["layers"] * heads * 2 * sizes["head_dim"],
        tensors=(table, *positions, *of_layers, *last, *([] if tied else head)),
        tied=((head[0].name, table.name),) if tied else (),
        source=source,
    )


def _linear(name: str, inputs: int, outputs: int, *, bias: bool = False) -> Tensors:
    numel = inputs * outputs
    weight = ParameterShape(f"{name}.weight", numel, numel, True)
    return [weight, _vector(f"{name}.bias", outputs)] if bias else [weight]


def _layer_norm(name: str, width: int) -> Tensors:
    return [_vector(f"{name}.weight", width), _vector(f"{name}.bias", width)]


def _vector(name: str, numel: int) -> ParameterShape:
    """Return a parameter that no token is multiplied by: a bias, the weight of a norm or a table."""
    return ParameterShape(name, numel, numel, False)
