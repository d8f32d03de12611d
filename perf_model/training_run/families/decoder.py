"""Build the ``ModelShape`` of a decoder-only transformer from its widths and the parameters of its layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from perf_model.training_run.model import (
    MAX_SIZES,
    ModelError,
    ModelShape,
    ParameterShape,
    divide_among_heads,
    require_integer,
)


@dataclass(frozen=True, kw_only=True)
class DecoderWidths:
    """The widths of a decoder-only transformer. Raise ``ModelError`` for impossible widths."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int

    def __post_init__(self) -> None:
        for key, value in vars(self).items():
            require_integer(key, value, 1, MAX_SIZES[key], "Correct the model's shape.")
        if self.heads % self.kv_heads:
            raise ModelError(
                f"kv_heads: must divide heads, found {self.kv_heads} for {self.heads}.\nCorrect the model's shape."
            )


class ModuleNames(NamedTuple):
    """The names of the modules of a decoder; by default those of Llama."""

    embedding: str = "model.embed_tokens"
    layers: str = "model.layers"
    norm: str = "model.norm"
    head: str = "lm_head"


LLAMA = ModuleNames()


def decoder(
    name: str,
    widths: DecoderWidths,
    layer: Callable[[int], list[ParameterShape]],
    *,
    modules: ModuleNames = LLAMA,
    positions: list[ParameterShape] | None = None,
    last_norm: list[ParameterShape] | None = None,
    tied: bool = False,
    head_bias: bool = False,
    scores_width: int | None = None,
    active_intermediate: int | None = None,
    source: str = "",
) -> ModelShape:
    """Return the shape of a decoder whose layer number ``i`` has the parameters ``layer(i)``.

    ``positions`` are learned position embeddings, and ``last_norm`` the norm after the layers, an RMSNorm by default.
    ``tied``: the output shares the weight of the embedding. ``scores_width`` is that of ``ModelShape``; by default
    queries and values are as wide as the heads. ``active_intermediate`` is the width of the feed-forward that a token
    passes, if it has experts. ``source`` is the origin of the figures.
    """
    table = f"{modules.embedding}.weight"
    head = linear(modules.head, widths.hidden, widths.vocab, bias=head_bias)
    tensors = [ParameterShape(table, widths.vocab * widths.hidden, widths.vocab * widths.hidden, tied)]
    tensors += positions or []
    for number in range(widths.layers):
        prefix = f"{modules.layers}.{number}."
        tensors += [tensor._replace(name=prefix + tensor.name) for tensor in layer(number)]
    tensors += norm(modules.norm, widths.hidden) if last_norm is None else last_norm
    tensors += head[1:] if tied else head
    return ModelShape(
        name=name,
        layers=widths.layers,
        hidden=widths.hidden,
        heads=widths.heads,
        kv_heads=widths.kv_heads,
        head_dim=widths.head_dim,
        intermediate=active_intermediate or widths.intermediate,
        vocab=widths.vocab,
        scores_width=scores_width or widths.layers * widths.heads * 2 * widths.head_dim,
        tensors=tuple(tensors),
        tied=((head[0].name, table),) if tied else (),
        source=source,
    )


def linear(name: str, inputs: int, outputs: int, *, bias: bool = False) -> list[ParameterShape]:
    """Return the parameters of a linear layer, which every token passes."""
    return [
        ParameterShape(f"{name}.weight", inputs * outputs, inputs * outputs, True),
        *([vector(f"{name}.bias", outputs)] if bias else []),
    ]


def vector(name: str, numel: int) -> ParameterShape:
    """Return a parameter that no token is multiplied by: a bias, the weight of a norm or a table."""
    return ParameterShape(name, numel, numel, False)


def norm(name: str, width: int, *, bias: bool = False) -> list[ParameterShape]:
    """Return the parameters of RMSNorm, or with ``bias`` those of LayerNorm."""
    return [vector(f"{name}.{kind}", width) for kind in ("weight", "bias")[: 2 if bias else 1]]


def norms(names: tuple[str, ...], width: int, *, bias: bool = False) -> list[ParameterShape]:
    """Return the parameters of several norms of one width."""
    return [tensor for name in names for tensor in norm(name, width, bias=bias)]


def attention(widths: DecoderWidths, *, qkv_bias: bool = False, bias: bool = False) -> list[ParameterShape]:
    """Return the parameters of attention with the names of Llama. ``bias`` is of all four, ``qkv_bias`` of three."""
    query, key_value = widths.heads * widths.head_dim, widths.kv_heads * widths.head_dim
    return [
        *linear("self_attn.q_proj", widths.hidden, query, bias=bias or qkv_bias),
        *linear("self_attn.k_proj", widths.hidden, key_value, bias=bias or qkv_bias),
        *linear("self_attn.v_proj", widths.hidden, key_value, bias=bias or qkv_bias),
        *linear("self_attn.o_proj", query, widths.hidden, bias=bias),
    ]


def feed_forward(hidden: int, intermediate: int, *, name: str = "mlp", bias: bool = False) -> list[ParameterShape]:
    """Return the parameters of a gated feed-forward with the names of Llama."""
    return [
        *linear(f"{name}.gate_proj", hidden, intermediate, bias=bias),
        *linear(f"{name}.up_proj", hidden, intermediate, bias=bias),
        *linear(f"{name}.down_proj", intermediate, hidden, bias=bias),
    ]


def gpt(
    name: str, layers: int, hidden: int, heads: int, vocab: int, positions: int, intermediate: int | None = None
) -> ModelShape:
    """Return a GPT as in the Megatron-LM paper: biases, tied embeddings, and a feed-forward of four times the width.

    ``positions`` is the number of learned position embeddings, 0 for rotary ones. ``intermediate`` is another width of
    the feed-forward. The parameters have names like those of Llama.
    """
    require_integer("learned_positions", positions, 0, MAX_SIZES["learned_positions"], "Correct the model's shape.")
    widths = DecoderWidths(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=divide_among_heads(hidden, heads),
        intermediate=4 * hidden if intermediate is None else intermediate,
        vocab=vocab,
    )
    of_layer = [
        *attention(widths, bias=True),
        *linear("mlp.up_proj", hidden, widths.intermediate, bias=True),
        *linear("mlp.down_proj", widths.intermediate, hidden, bias=True),
        *norms(("input_layernorm", "post_attention_layernorm"), hidden, bias=True),
    ]
    return decoder(
        name,
        widths,
        lambda number: of_layer,
        positions=[vector("model.embed_positions.weight", positions * hidden)] if positions else None,
        last_norm=norm("model.norm", hidden, bias=True),
        tied=True,
    )
