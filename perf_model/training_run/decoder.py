"""Define dense decoders by a few numbers, without a config and without torch."""

from __future__ import annotations

from collections.abc import Collection
from math import prod
from typing import Any

from perf_model.training_run.model import MAX_SIZES, ModelError, ModelShape, ParameterShape, require_integer

MIN_PARAMETERS, MAX_PARAMETERS = 10**8, 10**14

HEAD_DIM, SMALL_HEAD_DIM, LARGE_HIDDEN = 128, 64, 4096
"""The head dimensions of Llama 3 8B, used from a width of ``LARGE_HIDDEN`` on, and of Llama 3.2 1B."""

KV_HEADS = 8
"""The number of heads is a multiple of this, so that tensor-parallel ranks can divide them."""

HIDDEN_PER_LAYER = 128
"""The quotient of width and layers: 128 for Llama 3 8B, 102 for 70B, 130 for 405B."""

LARGE_PARAMETERS = 4 * 10**9
"""Llama 3, Qwen 2.5 and Qwen 3 do not tie their embeddings above this number of parameters."""

VOCAB, SMALL_VOCAB = 128_256, 50_304
"""The vocabularies of Llama 3, and of GPT-2 rounded up, which is used below 1e9 parameters."""

QKV = ("q_proj", "k_proj", "v_proj")
_NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
_OF_GPT = (*QKV, "o_proj", "up_proj", "down_proj", "input_layernorm", "post_attention_layernorm", "norm")


def gpt(
    name: str, layers: int, hidden: int, heads: int, vocab: int, positions: int, intermediate: int | None = None
) -> ModelShape:
    """Return a GPT as in the Megatron-LM paper, with biases and tied embeddings, and with the names of Llama.

    It has ``positions`` learned position embeddings, 0 with rotary ones. ``intermediate`` defaults to ``4 * hidden``.
    """
    sizes: dict[str, Any] = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": heads, "vocab": vocab}
    sizes |= {"head_dim": hidden // heads, "positions": positions, "intermediate": intermediate or 4 * hidden}
    return llama(name, biases=_OF_GPT, tied=True, gated=False, **sizes)


def generic_model(numel: int, layers: int | None = None, hidden: int | None = None) -> ModelShape:
    """Return a dense model like Llama with exactly ``numel`` parameters.

    Raise ``ModelError`` if there is none. ``layers`` and ``hidden`` default to plausible numbers, from which the width
    of the feed-forward follows. The last few parameters, which no width divides, are a vector ``model.rest``.
    """
    require_integer("--params", numel, MIN_PARAMETERS, MAX_PARAMETERS, "Correct --params.")
    for key, value in {"layers": layers, "hidden": hidden}.items():
        if value is not None:
            require_integer(f"--{key}", value, 1, MAX_SIZES[key], f"Correct --{key}.")
    # A layer has about 12 * hidden ** 2 parameters (arXiv 2104.04473, equation 2).
    if layers is None:
        cubed = numel / (12 * HIDDEN_PER_LAYER**2)
        layers = round(cubed ** (1 / 3) if hidden is None else numel / (12 * hidden**2))
        layers = max(1, min(MAX_SIZES["layers"], layers))
    if hidden is None:
        width = (numel / (12 * layers)) ** 0.5
        step = KV_HEADS * _head_dim(width)
        hidden = max(1, round(width / step)) * step
    heads = max(1, hidden // _head_dim(hidden))
    kv_heads = KV_HEADS if heads % KV_HEADS == 0 else heads
    sizes: dict[str, Any] = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads}
    sizes |= {"head_dim": _head_dim(hidden), "tied": numel < LARGE_PARAMETERS}
    sizes |= {"vocab": VOCAB if numel >= 10**9 else SMALL_VOCAB}
    least = llama("", **sizes, intermediate=1).numel
    if numel < least:
        found = f"{numel:,} for {layers} layers of width {hidden:,}, which have {least:,} or more"
        rule = f"--params: must leave some parameters to the feed-forward, found {found}"
        raise ModelError(f"{rule}.\nCorrect --layers or --hidden.")
    more, rest = divmod(numel - least, layers * 3 * hidden)
    wider_layers, rest = divmod(rest, 3 * hidden)
    source = (
        f"a generic dense model with {layers} layers of width {hidden:,}, feed-forwards of {1 + more:,} and a "
        f"vocabulary of {sizes['vocab']:,}; --layers and --hidden change it"
    )
    sizes |= {"intermediate": 1 + more, "wider_layers": wider_layers, "rest": rest, "source": source}
    return llama(f"Dense {numel / 1e9:.10g}B", **sizes)


def _head_dim(hidden: float) -> int:
    return HEAD_DIM if hidden >= LARGE_HIDDEN else SMALL_HEAD_DIM


def llama(
    name: str,
    *,
    biases: Collection[str] = (),
    gated: bool = True,
    tied: bool = False,
    qk_norm: bool = False,
    norms_of_feed_forward: bool = False,
    experts: int = 0,
    experts_per_token: int = 1,
    positions: int = 0,
    wider_layers: int = 0,
    rest: int = 0,
    source: str = "",
    **sizes: Any,
) -> ModelShape:
    """Return a decoder like Llama, with biases in the modules ``biases``. ``sizes`` are fields of ``ModelShape``.

    The feed-forwards of the first ``wider_layers`` are wider by one. ``tied``: the head uses the table of tokens. A
    Qwen 3 has ``qk_norm``, of one head's width, and a Gemma 2 has ``norms_of_feed_forward``.
    """
    layers, hidden, vocab, head_dim = (sizes[key] for key in ("layers", "hidden", "vocab", "head_dim"))
    query, key_value = sizes["heads"] * head_dim, sizes["kv_heads"] * head_dim
    # Parameters with two widths are multiplied. A table that is only looked up counts as a vector.
    table = "model.embed_tokens.weight"
    widths: dict[str, tuple[int, ...]] = {table: (vocab, hidden) if tied else (vocab * hidden,)}
    if positions:
        widths["model.embed_positions.weight"] = (positions * hidden,)
    for number in range(layers):
        width = sizes["intermediate"] // experts_per_token + (number < wider_layers)
        feed_forward: dict[str, tuple[int, ...]] = {
            **({"mlp.gate_proj": (hidden, width)} if gated else {}),
            "mlp.up_proj": (hidden, width),
            "mlp.down_proj": (width, hidden),
        }
        if experts:
            feed_forward = {
                "mlp.experts.gate_up_proj": (experts, hidden, 2 * width),
                "mlp.experts.down_proj": (experts, width, hidden),
                "mlp.gate": (hidden, experts),
            }
        of_layer: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj": (hidden, query),
            "self_attn.k_proj": (hidden, key_value),
            "self_attn.v_proj": (hidden, key_value),
            "self_attn.o_proj": (query, hidden),
            **(dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), (head_dim,)) if qk_norm else {}),
            **feed_forward,
            **dict.fromkeys(_NORMS if norms_of_feed_forward else _NORMS[:2], (hidden,)),
        }
        for module, each in of_layer.items():
            # The weights of all experts are one parameter, without a module of their own.
            widths[f"model.layers.{number}.{module}{'' if len(each) == 3 else '.weight'}"] = each
    widths["model.norm.weight"] = (hidden,)
    if rest:
        widths["model.rest"] = (rest,)
    if not tied:
        widths["lm_head.weight"] = (hidden, vocab)
    tensors = []
    for parameter, each in widths.items():
        active = prod(each) * experts_per_token // experts if len(each) == 3 else prod(each)
        tensors.append(ParameterShape(parameter, prod(each), active, len(each) > 1))
        if parameter.split(".")[-2] in biases:
            tensors.append(ParameterShape(parameter.replace("weight", "bias"), each[-1], each[-1], False))
    return ModelShape(
        name=name,
        **sizes,
        scores_width=layers * query * 2,
        tensors=tuple(tensors),
        tied=(("lm_head.weight", table),) if tied else (),
        source=source,
    )
