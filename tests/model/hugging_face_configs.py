"""Define configs of published models, and build models from configs with transformers, without memory for weights."""

from __future__ import annotations

from typing import Any

import torch
import transformers

SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "vocab_size"),
)


def config(family: str, *sizes: int, **more: Any) -> dict[str, Any]:
    """Return the config of a model of ``family`` with these ``SIZES``."""
    return {"model_type": family, **dict(zip(SIZES, sizes, strict=True)), **more}


OF_QWEN_3_MOE = {
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
OF_GPT_OSS = {"head_dim": 64, "num_experts_per_tok": 4}
OF_DEEPSEEK = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}

# fmt: off
PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama-3-8B": config("llama", 4096, 14336, 32, 32, 8, 128256),
    "Mistral-7B-v0.3": config("mistral", 4096, 14336, 32, 32, 8, 32768),
    "Qwen2.5-7B": config("qwen2", 3584, 18944, 28, 28, 4, 152064),
    "Qwen3-8B": config("qwen3", 4096, 12288, 36, 32, 8, 151936, head_dim=128),
    "gemma-7b": config("gemma", 3072, 24576, 28, 16, 16, 256000, head_dim=256),
    "gemma-2-9b": config("gemma2", 3584, 14336, 42, 16, 8, 256000, head_dim=256),
    "gemma-3-1b": config("gemma3_text", 1152, 6912, 26, 4, 1, 262144, head_dim=256),
    "phi-2": config("phi", 2560, 10240, 32, 32, 32, 51200),
    "Phi-3-mini-4k": config("phi3", 3072, 8192, 32, 32, 32, 32064),
    "phi-4": config("phi3", 5120, 17920, 40, 40, 10, 100352, pad_token_id=100349),
    "OLMo-7B": config("olmo", 4096, 11008, 32, 32, 32, 50304),
    "OLMo-2-7B": config("olmo2", 4096, 11008, 32, 32, 32, 100352),
    "gpt2-xl": {
        "model_type": "gpt2", "n_embd": 1600, "n_head": 25, "n_layer": 48, "n_positions": 1024, "vocab_size": 50257
    },
    "pythia-6.9b": {
        "model_type": "gpt_neox", "hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 32,
        "num_attention_heads": 32, "vocab_size": 50432,
    },
    "Mixtral-8x7B": config("mixtral", 4096, 14336, 32, 32, 8, 32000, num_experts_per_tok=2, num_local_experts=8),
    "Qwen1.5-MoE-A2.7B": config(
        "qwen2_moe", 2048, 5632, 24, 16, 16, 151936, moe_intermediate_size=1408, shared_expert_intermediate_size=5632,
        num_experts=60, num_experts_per_tok=4, decoder_sparse_step=1,
    ),
    "Qwen3-30B-A3B": config("qwen3_moe", 2048, 6144, 48, 32, 4, 151936, moe_intermediate_size=768, **OF_QWEN_3_MOE),
    "Qwen3-235B-A22B": config(
        "qwen3_moe", 4096, 12288, 94, 64, 4, 151936, moe_intermediate_size=1536, **OF_QWEN_3_MOE
    ),
    "gpt-oss-20b": config("gpt_oss", 2880, 2880, 24, 64, 8, 201088, num_local_experts=32, **OF_GPT_OSS),
    "gpt-oss-120b": config("gpt_oss", 2880, 2880, 36, 64, 8, 201088, num_local_experts=128, **OF_GPT_OSS),
    "DeepSeek-V2-Lite": config(
        "deepseek_v2", 2048, 10944, 27, 16, 16, 102400, moe_intermediate_size=1408, n_routed_experts=64,
        n_shared_experts=2, num_experts_per_tok=6, first_k_dense_replace=1, q_lora_rank=None, n_group=1, topk_group=1,
        **OF_DEEPSEEK,
    ),
    "DeepSeek-V2": config(
        "deepseek_v2", 5120, 12288, 60, 128, 128, 102400, moe_intermediate_size=1536, n_routed_experts=160,
        n_shared_experts=2, num_experts_per_tok=6, first_k_dense_replace=1, q_lora_rank=1536, n_group=8, topk_group=3,
        **OF_DEEPSEEK,
    ),
    "DeepSeek-V3": config(
        "deepseek_v3", 7168, 18432, 61, 128, 128, 129280, moe_intermediate_size=2048, n_routed_experts=256,
        n_shared_experts=1, num_experts_per_tok=8, first_k_dense_replace=3, num_nextn_predict_layers=1,
        q_lora_rank=1536, n_group=8, topk_group=4, **OF_DEEPSEEK,
    ),
}
# fmt: on
"""The sizes in the published ``config.json`` of these models; the remaining keys have no influence on parameters."""


def small(values: dict[str, Any], layers: int = 3) -> dict[str, Any]:
    """Return the config of a model of the same family with a few layers and small widths."""
    numbers = {
        "hidden_size": 48,
        "intermediate_size": 100,
        "num_hidden_layers": layers,
        "num_attention_heads": 6,
        "num_key_value_heads": 6 if values["model_type"].startswith("deepseek") else 2,
        "head_dim": 8,
        "vocab_size": 211,
        "pad_token_id": 0,
        "n_embd": 48,
        "n_layer": layers,
        "n_head": 6,
        "n_positions": 77,
        "num_experts": 4,
        "num_local_experts": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 24,
        "n_group": 1,
        "topk_group": 1,
        "kv_lora_rank": 6,
        "first_k_dense_replace": 1,
    }
    return {**values, **{key: number for key, number in numbers.items() if key in values or key == "pad_token_id"}}


def built(values: dict[str, Any]) -> Any:
    """Return the model that transformers builds from a config, on the meta device."""
    config = transformers.CONFIG_MAPPING[values["model_type"]].from_dict(values)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def parameters_of(model: Any) -> list[tuple[str, int]]:
    """Return the name and the number of elements of each parameter."""
    return [(name, parameter.numel()) for name, parameter in model.named_parameters()]
