"""Define the dense families: Llama, Mistral, Qwen, Gemma, Phi, OLMo, GPT-2 and GPT-NeoX."""

from __future__ import annotations

from perf_model.training_run.families.config_values import HuggingFaceConfig
from perf_model.training_run.families.decoder import (
    DecoderWidths,
    ModuleNames,
    attention,
    decoder,
    feed_forward,
    linear,
    norm,
    norms,
    vector,
)
from perf_model.training_run.model import ModelShape, ParameterShape, divide_among_heads

BEFORE_EACH = ("input_layernorm", "post_attention_layernorm")
"""The norms of Llama: one before attention, one before the feed-forward."""

AROUND_EACH = (*BEFORE_EACH, "pre_feedforward_layernorm", "post_feedforward_layernorm")
"""The norms of Gemma 2 and 3: before and after attention, before and after the feed-forward."""

AFTER_EACH = ("post_attention_layernorm", "post_feedforward_layernorm")
"""The norms of OLMo 2."""


def head_norms(widths: DecoderWidths) -> list[ParameterShape]:
    """Return the norms of queries and keys, which the heads share."""
    return norms(("self_attn.q_norm", "self_attn.k_norm"), widths.head_dim)


def llama(config: HuggingFaceConfig, name: str) -> ModelShape:
    """Return the shape of a Llama."""
    widths, bias = config.widths(), config.flag("attention_bias", default=False)
    of_layer = [
        *attention(widths, bias=bias),
        *feed_forward(widths.hidden, widths.intermediate, bias=config.flag("mlp_bias", default=False)),
        *norms(BEFORE_EACH, widths.hidden),
    ]
    return decoder(name, widths, lambda number: of_layer, tied=config.flag("tie_word_embeddings", default=False))


def mistral(config: HuggingFaceConfig, name: str) -> ModelShape:
    """Return the shape of a Mistral."""
    return _with_gated_feed_forward(config, name, config.widths(kv_heads=8))


def qwen2(config: HuggingFaceConfig, name: str) -> ModelShape:
    """Return the shape of a Qwen 2 or 2.5."""
    return _with_gated_feed_forward(config, name, config.widths(kv_heads=32), qkv_bias=True)


def qwen3(config: HuggingFaceConfig, name: str) -> ModelShape:
    """Return the shape of a Qwen 3."""
    return _with_gated_feed_forward(config, name, config.widths(kv_heads=32, head_dim=128), normalised_heads=True)


def gemma(config: HuggingFaceConfig, name: str) -> ModelShape:
    """Return the shape of a Gemma 1."""
    return _with_gated_feed_forward(config, name, config.widths(kv_heads=16, head_dim=256), tied=True)


def gemma2(config: HuggingFaceConfig, name: str) -> ModelShape:
    """Return the shape of a Gemma 2."""
    widths = config.widths(kv_heads=4, head_dim=256)
    return _with_gated_feed_forward(config, name, widths, norm_names=AROUND_EACH, tied=True)


def gemma3(config: HuggingFaceConfig, name: str) -> ModelShape:
    """Return the shape of a Gemma 3 without images (``gemma3_text``)."""
    widths = config.widths(kv_heads=4, head_dim=256)
    return _with_gated_feed_forward(config, name, widths, norm_names=AROUND_EACH, normalised_heads=True, tied=True)


def _with_gated_feed_forward(
    config: HuggingFaceConfig,
    name: str,
    widths: DecoderWidths,
    *,
    norm_names: tuple[str, ...] = BEFORE_EACH,
    qkv_bias: bool = False,
    normalised_heads: bool = False,
    tied: bool = False,
) -> ModelShape:
    """Return a shape like that of Llama. ``tied`` is the family's default."""
    bias = not qkv_bias and config.flag("attention_bias", default=False)
    of_layer = attention(widths, bias=bias, qkv_bias=qkv_bias)
    of_layer += head_norms(widths) if normalised_heads else []
    of_layer += feed_forward(widths.hidden, widths.intermediate) + norms(norm_names, widths.hidden)
    return decoder(name, widths, lambda number: of_layer, tied=config.flag("tie_word_embeddings", default=tied))


def olmo(config: HuggingFaceConfig, name: str) -> ModelShape:
    """Return the shape of an OLMo 1, whose norms have no parameters."""
    widths = config.widths()
    of_layer = attention(widths, bias=config.flag("attention_bias", default=False))
    of_layer += feed_forward(widths.hidden, widths.intermediate)
    tied = config.flag("tie_word_embeddings", default=False)
    return decoder(name, widths, lambda number: of_layer, last_norm=[], tied=tied)


def olmo2(config: HuggingFaceConfig, name: str) -> ModelShape:
    """Return the shape of an OLMo 2, which normalises queries and keys over all heads."""
    widths = config.widths()
    of_layer = [
        *attention(widths, bias=config.flag("attention_bias", default=False)),
        *norm("self_attn.q_norm", widths.heads * widths.head_dim),
        *norm("self_attn.k_norm", widths.kv_heads * widths.head_dim),
        *feed_forward(widths.hidden, widths.intermediate),
        *norms(AFTER_EACH, widths.hidden),
    ]
    return decoder(name, widths, lambda number: of_layer, tied=config.flag("tie_word_embeddings", default=False))


def phi(config: HuggingFaceConfig, name: str) -> ModelShape:
    """Return the shape of a Phi 1, 1.5 or 2, whose attention and feed-forward have one common norm."""
    widths = config.widths()
    *queries_keys_values, output, output_bias = attention(widths, bias=True)
    of_layer = [
        *queries_keys_values,
        output._replace(name="self_attn.dense.weight"),
        output_bias._replace(name="self_attn.dense.bias"),
    ]
    if config.flag("qk_layernorm", default=False):
        of_layer += norms(("self_attn.q_layernorm", "self_attn.k_layernorm"), widths.head_dim, bias=True)
    of_layer += linear("mlp.fc1", widths.hidden, widths.intermediate, bias=True)
    of_layer += linear("mlp.fc2", widths.intermediate, widths.hidden, bias=True)
    of_layer += norm("input_layernorm", widths.hidden, bias=True)
    last = "model.final_layernorm"
    return decoder(
        name,
        widths,
        lambda number: of_layer,
        modules=ModuleNames(norm=last),
        last_norm=norm(last, widths.hidden, bias=True),
        tied=config.flag("tie_word_embeddings", default=False),
        head_bias=True,
    )


def phi3(config: HuggingFaceConfig, name: str) -> ModelShape:
    """Return the shape of a Phi 3 or 4, which fuses queries, keys and values, and the two inputs of the gate."""
    widths = config.widths()
    query, key_value = widths.heads * widths.head_dim, widths.kv_heads * widths.head_dim
    of_layer = [
        *linear("self_attn.o_proj", query, widths.hidden),
        *linear("self_attn.qkv_proj", widths.hidden, query + 2 * key_value),
        *linear("mlp.gate_up_proj", widths.hidden, 2 * widths.intermediate),
        *linear("mlp.down_proj", widths.intermediate, widths.hidden),
        *norms(BEFORE_EACH, widths.hidden),
    ]
    return decoder(name, widths, lambda number: of_layer, tied=config.flag("tie_word_embeddings", default=False))


def gpt2(config: HuggingFaceConfig, name: str) -> ModelShape:
    """Return the shape of a GPT-2, whose matrices are fused and transposed."""
    hidden, heads = config.integer("n_embd", "hidden"), config.integer("n_head", "heads")
    widths = DecoderWidths(
        layers=config.integer("n_layer", "layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=divide_among_heads(hidden, heads),
        intermediate=config.integer("n_inner", "intermediate", null=4 * hidden),
        vocab=config.integer("vocab_size", "vocab"),
    )
    positions = config.integer("n_positions", "learned_positions")
    of_layer = [
        *norm("ln_1", hidden, bias=True),
        *linear("attn.c_attn", hidden, 3 * hidden, bias=True),
        *linear("attn.c_proj", hidden, hidden, bias=True),
        *norm("ln_2", hidden, bias=True),
        *linear("mlp.c_fc", hidden, widths.intermediate, bias=True),
        *linear("mlp.c_proj", widths.intermediate, hidden, bias=True),
    ]
    return decoder(
        name,
        widths,
        lambda number: of_layer,
        modules=ModuleNames("transformer.wte", "transformer.h", "transformer.ln_f"),
        positions=[vector("transformer.wpe.weight", positions * hidden)],
        last_norm=norm("transformer.ln_f", hidden, bias=True),
        tied=config.flag("tie_word_embeddings", default=True),
    )


def gpt_neox(config: HuggingFaceConfig, name: str) -> ModelShape:
    """Return the shape of a GPT-NeoX or Pythia."""
    hidden, heads = config.integer("hidden_size", "hidden"), config.integer("num_attention_heads", "heads")
    widths = DecoderWidths(
        layers=config.integer("num_hidden_layers", "layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=divide_among_heads(hidden, heads),
        intermediate=config.integer("intermediate_size", "intermediate"),
        vocab=config.integer("vocab_size", "vocab"),
    )
    bias = config.flag("attention_bias", default=True)
    of_layer = [
        *norms(BEFORE_EACH, widths.hidden, bias=True),
        *linear("attention.query_key_value", widths.hidden, 3 * widths.hidden, bias=bias),
        *linear("attention.dense", widths.hidden, widths.hidden, bias=bias),
        *linear("mlp.dense_h_to_4h", widths.hidden, widths.intermediate, bias=True),
        *linear("mlp.dense_4h_to_h", widths.intermediate, widths.hidden, bias=True),
    ]
    last = "gpt_neox.final_layer_norm"
    return decoder(
        name,
        widths,
        lambda number: of_layer,
        modules=ModuleNames("gpt_neox.embed_in", "gpt_neox.layers", last),
        last_norm=norm(last, widths.hidden, bias=True),
        tied=config.flag("tie_word_embeddings", default=False),
    )
