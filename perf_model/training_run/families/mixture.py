"""Define the families with a mixture of experts: Mixtral, Qwen 2 and 3 MoE, GPT-OSS, and DeepSeek 2 and 3.

As transformers 5 does, the weights of all experts of a layer are one parameter per matrix.
"""

from __future__ import annotations

from perf_model.training_run.families.config_values import HuggingFaceConfig
from perf_model.training_run.families.decoder import (
    DecoderWidths,
    attention,
    decoder,
    feed_forward,
    linear,
    norm,
    norms,
    vector,
)
from perf_model.training_run.families.dense import BEFORE_EACH, head_norms
from perf_model.training_run.model import ModelError, ModelShape, ParameterShape


class RoutedExperts:
    """The experts of a layer, all of one ``width``; each token is routed to ``per_token`` of ``count``."""

    def __init__(self, config: HuggingFaceConfig, *, count: str, width: str) -> None:
        self._hidden = config.integer("hidden_size", "hidden")
        self._count = config.integer(count, "experts")
        self._width = config.integer(width, "intermediate")
        self._per_token = config.integer("num_experts_per_tok", "experts")
        if self._per_token > self._count:
            rule = f"num_experts_per_tok: must be at most {count}, {self._count}, found {self._per_token}"
            raise ModelError(f"{rule}.\nCorrect the config.json.")

    @property
    def active_width(self) -> int:
        """Return the width of the experts of one token together."""
        return self._per_token * self._width

    def weights(self) -> list[ParameterShape]:
        """Return the two weights: that of the gate with the input, and that of the output."""
        return [
            self._parameter("gate_up_proj", self._hidden * 2 * self._width),
            self._parameter("down_proj", self._width * self._hidden),
        ]

    def biases(self) -> list[ParameterShape]:
        """Return the biases of the two weights."""
        return [
            self._parameter("gate_up_proj_bias", 2 * self._width, multiplied=False),
            self._parameter("down_proj_bias", self._hidden, multiplied=False),
        ]

    def router(self, name: str = "mlp.gate", *, bias: bool = False) -> list[ParameterShape]:
        """Return the parameters of the router, which every token passes."""
        return linear(name, self._hidden, self._count, bias=bias)

    def _parameter(self, name: str, numel: int, *, multiplied: bool = True) -> ParameterShape:
        return ParameterShape(f"mlp.experts.{name}", self._count * numel, self._per_token * numel, multiplied)


def mixtral(config: HuggingFaceConfig, name: str) -> ModelShape:
    """Return the shape of a Mixtral."""
    widths = config.widths(kv_heads=8)
    experts = RoutedExperts(config, count="num_local_experts", width="intermediate_size")
    of_layer = [
        *attention(widths),
        *experts.router(),
        *experts.weights(),
        *norms(BEFORE_EACH, widths.hidden),
    ]
    tied = config.flag("tie_word_embeddings", default=False)
    return decoder(name, widths, lambda number: of_layer, tied=tied, active_intermediate=experts.active_width)


def gpt_oss(config: HuggingFaceConfig, name: str) -> ModelShape:
    """Return the shape of a GPT-OSS, whose heads have sinks and whose experts have biases."""
    widths = config.widths(kv_heads=8, head_dim=64)
    experts = RoutedExperts(config, count="num_local_experts", width="intermediate_size")
    weight, output = experts.weights()
    bias, output_bias = experts.biases()
    of_layer = [
        vector("self_attn.sinks", widths.heads),
        *attention(widths, bias=config.flag("attention_bias", default=True)),
        *experts.router("mlp.router", bias=True),
        *(weight, bias, output, output_bias),
        *norms(BEFORE_EACH, widths.hidden),
    ]
    tied = config.flag("tie_word_embeddings", default=False)
    return decoder(name, widths, lambda number: of_layer, tied=tied, active_intermediate=experts.active_width)


def qwen2_moe(config: HuggingFaceConfig, name: str) -> ModelShape:
    """Return the shape of a Qwen 1.5 or 2 MoE, which has a shared expert with a gate."""
    widths = config.widths(kv_heads=16)
    experts = RoutedExperts(config, count="num_experts", width="moe_intermediate_size")
    shared = config.integer("shared_expert_intermediate_size", "intermediate")
    mixture = [
        *experts.router(),
        *experts.weights(),
        *feed_forward(widths.hidden, shared, name="mlp.shared_expert"),
        *linear("mlp.shared_expert_gate", widths.hidden, 1),
    ]
    of_attention = attention(widths, qkv_bias=config.flag("qkv_bias", default=True))
    return _with_sparse_step(config, name, widths, of_attention, mixture, experts.active_width + shared)


def qwen3_moe(config: HuggingFaceConfig, name: str) -> ModelShape:
    """Return the shape of a Qwen 3 MoE."""
    widths = config.widths(kv_heads=4)
    experts = RoutedExperts(config, count="num_experts", width="moe_intermediate_size")
    mixture = experts.weights() + experts.router()
    of_attention = attention(widths, bias=config.flag("attention_bias", default=False)) + head_norms(widths)
    return _with_sparse_step(config, name, widths, of_attention, mixture, experts.active_width)


def _with_sparse_step(
    config: HuggingFaceConfig,
    name: str,
    widths: DecoderWidths,
    of_attention: list[ParameterShape],
    mixture: list[ParameterShape],
    active_intermediate: int,
) -> ModelShape:
    """Return the shape of a Qwen MoE: layers have experts at each step, unless ``mlp_only_layers`` names them."""
    step = config.integer("decoder_sparse_step", "layers", missing=1)
    without_experts = config.layer_numbers("mlp_only_layers")
    dense, after = feed_forward(widths.hidden, widths.intermediate), norms(BEFORE_EACH, widths.hidden)

    def layer(number: int) -> list[ParameterShape]:
        sparse = number not in without_experts and (number + 1) % step == 0
        return of_attention + (mixture if sparse else dense) + after

    tied = config.flag("tie_word_embeddings", default=False)
    return decoder(name, widths, layer, tied=tied, active_intermediate=active_intermediate)


def deepseek_v2(config: HuggingFaceConfig, name: str) -> ModelShape:
    """Return the shape of a DeepSeek 2."""
    return _deepseek(config, name, dense_layers=0, bias=config.flag("mlp_bias", default=False))


def deepseek_v3(config: HuggingFaceConfig, name: str) -> ModelShape:
    """Return the shape of a DeepSeek 3 or R1, without the modules that predict further tokens."""
    return _deepseek(config, name, dense_layers=3)


def _deepseek(config: HuggingFaceConfig, name: str, *, dense_layers: int, bias: bool = False) -> ModelShape:
    """Return a shape with latent attention and shared experts. ``bias`` is of feed-forwards and shared experts.

    ``dense_layers`` is the default number of the first layers without experts.
    """
    widths = DecoderWidths(
        layers=config.integer("num_hidden_layers", "layers"),
        hidden=config.integer("hidden_size", "hidden"),
        heads=config.integer("num_attention_heads", "heads"),
        kv_heads=config.integer("num_attention_heads", "heads"),
        head_dim=config.integer("v_head_dim", "head_dim", missing=128),
        intermediate=config.integer("intermediate_size", "intermediate"),
        vocab=config.integer("vocab_size", "vocab"),
    )
    experts = RoutedExperts(config, count="n_routed_experts", width="moe_intermediate_size")
    shared_width = config.integer("n_shared_experts", "experts") * config.integer(
        "moe_intermediate_size", "intermediate"
    )
    of_attention, query_width = _latent_attention(config, widths)
    after = norms(BEFORE_EACH, widths.hidden)
    dense = feed_forward(widths.hidden, widths.intermediate, bias=bias)
    mixture = [
        *experts.weights(),
        *experts.router(),
        *feed_forward(widths.hidden, shared_width, name="mlp.shared_experts", bias=bias),
    ]
    first = config.integer("first_k_dense_replace", "layers", missing=dense_layers, null=dense_layers, least=0)
    return decoder(
        name,
        widths,
        lambda number: of_attention + (dense if number < first else mixture) + after,
        tied=config.flag("tie_word_embeddings", default=False),
        scores_width=widths.layers * widths.heads * (query_width + widths.head_dim),
        active_intermediate=experts.active_width + shared_width,
    )


def _latent_attention(config: HuggingFaceConfig, widths: DecoderWidths) -> tuple[list[ParameterShape], int]:
    """Return the parameters of latent attention (arXiv 2405.04434, section 2.1), and the width of a query."""
    bias = config.flag("attention_bias", default=False)
    rope = config.integer("qk_rope_head_dim", "head_dim", missing=64)
    unrotated = config.integer("qk_nope_head_dim", "head_dim", missing=128)
    rank = config.integer("kv_lora_rank", "rank", missing=512)
    hidden, heads, query_width = widths.hidden, widths.heads, unrotated + rope
    tensors = []
    if config.is_null("q_lora_rank"):
        tensors += linear("self_attn.q_proj", hidden, heads * query_width)
    else:
        query_rank = config.integer("q_lora_rank", "rank", missing=1536)
        tensors += linear("self_attn.q_a_proj", hidden, query_rank, bias=bias)
        tensors += norm("self_attn.q_a_layernorm", query_rank)
        tensors += linear("self_attn.q_b_proj", query_rank, heads * query_width)
    tensors += linear("self_attn.kv_a_proj_with_mqa", hidden, rank + rope, bias=bias)
    tensors += norm("self_attn.kv_a_layernorm", rank)
    tensors += linear("self_attn.kv_b_proj", rank, heads * (unrotated + widths.head_dim))
    tensors += linear("self_attn.o_proj", heads * widths.head_dim, hidden, bias=bias)
    return tensors, query_width
