"""Test the models that transformers builds from a config: sizes, operations, the order of use, and refused configs."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from perf_model.presets.models import MODELS
from perf_model.training_run.hf_config import parse_hf_config
from perf_model.training_run.model import ModelError, ModelShape, has_weight_decay
from tests.launch import REPOSITORY

SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "vocab_size"),
)


def config(family: str, *sizes: int, **more: Any) -> dict[str, Any]:
    return {"model_type": family, **dict(zip(SIZES, sizes, strict=True)), **more}


PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama-3-8B": config("llama", 4096, 14336, 32, 32, 8, 128256),
    "Qwen3-4B": config("qwen3", 2560, 9728, 36, 32, 8, 151936, head_dim=128, tie_word_embeddings=True),
    "Gemma-2-9B": config("gemma2", 3584, 14336, 42, 16, 8, 256000, head_dim=256),
    "phi-4": config("phi3", 5120, 17920, 40, 40, 10, 100352, pad_token_id=100349),
    "gpt2-xl": {"model_type": "gpt2", "n_embd": 1600, "n_head": 25, "n_layer": 48, "n_positions": 1024},
    "Mixtral-8x7B": config("mixtral", 4096, 14336, 32, 32, 8, 32000, num_experts_per_tok=2, num_local_experts=8),
    "gpt-oss-20b": config(
        *("gpt_oss", 2880, 2880, 24, 64, 8, 201088), num_local_experts=32, head_dim=64, num_experts_per_tok=4
    ),
    "DeepSeek-V3": config(
        *("deepseek_v3", 7168, 18432, 61, 128, 128, 129280),
        **{"moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8},
        **{"first_k_dense_replace": 3, "q_lora_rank": 1536, "n_group": 8, "topk_group": 4},
        **{"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
    ),
}
"""The sizes in the published ``config.json`` of a model of each kind; other families are counted by the same code."""


def small(values: dict[str, Any], layers: int = 3) -> dict[str, Any]:
    kv_heads = 6 if values["model_type"].startswith("deepseek") else 2
    numbers = {
        **{"hidden_size": 48, "intermediate_size": 100, "num_hidden_layers": layers, "num_attention_heads": 6},
        **{"num_key_value_heads": kv_heads, "head_dim": 8, "vocab_size": 211, "pad_token_id": 0},
        **{"n_embd": 48, "n_layer": layers, "n_head": 6, "n_positions": 77},
        **{"num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20},
        **{"n_group": 1, "topk_group": 1, "kv_lora_rank": 6, "first_k_dense_replace": 1},
    }
    return {**values, **{key: number for key, number in numbers.items() if key in values or key == "pad_token_id"}}


def built(values: dict[str, Any]) -> Any:
    config = transformers.CONFIG_MAPPING[values["model_type"]].from_dict(values)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def shape_of(values: dict[str, Any], name: str = "") -> ModelShape:
    return parse_hf_config(json.dumps(values), name)


def test_presets_have_the_parameters_and_sizes_that_transformers_builds() -> None:
    for name in ("Llama-3-8B", "Qwen3-4B", "Gemma-2-9B"):
        assert replace(shape_of(PUBLISHED[name], name), source="") == MODELS[name]


@pytest.mark.parametrize(
    ("name", "sizes", "active"),
    [
        # Model cards and table 1 of arXiv 2508.10925 round the active parameters.
        ("Mixtral-8x7B", ((32, 8, 128), 28672, 262144, 291, 46_702_792_704), 12.9e9),
        ("gpt-oss-20b", ((64, 8, 64), 11520, 196608, 411, 20_914_757_184), 4.19e9),
        # Queries and keys are 192 wide, values 128.
        ("DeepSeek-V3", ((128, 128, 128), 18432, 61 * 128 * (192 + 128), 909, 671_026_404_352), 37.5e9),
    ],
)
def test_a_published_model_has_the_sizes_of_its_formula(name: str, sizes: tuple[object, ...], active: float) -> None:
    """Check all experts in memory, and a token's experts in widths and active parameters."""
    shape = shape_of(PUBLISHED[name], name)
    heads = (shape.heads, shape.kv_heads, shape.head_dim)
    assert (heads, shape.intermediate, shape.scores_width, len(shape.tensors), shape.numel) == sizes
    assert shape.active_numel == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", PUBLISHED)
def test_every_parameter_is_counted_and_used_once_in_the_order_of_layers(name: str, tied: bool) -> None:
    values = {**small(PUBLISHED[name]), "tie_word_embeddings": tied}
    model, shape = built(values), shape_of(values)
    assert shape.parameters() == [(name, parameter.numel()) for name, parameter in model.named_parameters()]
    assert bool(shape.tied) is tied
    order = shape.first_use()
    assert (sorted(order), order[0]) == (sorted(name for name, _ in shape.parameters()), shape.tensors[0].name)
    layers = [int(part) for name in order for part in name.split(".") if part.isdigit()]
    assert layers == sorted(layers)
    decayed = set(transformers.Trainer.get_decay_parameter_names(None, model))
    assert {name for name in order if has_weight_decay(name)} == decayed & set(order), "as in the Trainer"


def test_a_model_for_images_is_counted_whole_and_its_encoder_computes_nothing_for_a_text() -> None:
    text = {**small(PUBLISHED["Gemma-2-9B"], layers=2), "model_type": "gemma3_text"}
    vision = {"model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    vision |= {"num_attention_heads": 4, "image_size": 28, "patch_size": 14}
    shape = shape_of({"model_type": "gemma3", "text_config": text, "vision_config": vision, "mm_tokens_per_image": 4})
    rows = {tensor.name: (tensor.numel, tensor.multiplied) for tensor in shape.tensors}
    encoder = {name for name in rows if "vision_tower" in name}
    assert len(encoder) > 10
    assert not any(rows[name][1] for name in encoder)
    assert rows["model.language_model.layers.1.mlp.up_proj.weight"] == (48 * 100, True)
    assert (shape.layers, shape.hidden, shape.vocab) == (2, 48, 211)


LLAMA = small(PUBLISHED["Llama-3-8B"])
REMEDY = "Give --params with the number of parameters, in place of --model."


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": ["llama"]}, "model_type: must name the family of the model, found "),
        ({"vocab_size": 10**18}, "vocab of 'llama': must be an integer from 1 to 100,000,000, found 10"),
        ({"num_hidden_layers": 10**6}, "layers of 'llama': must be an integer from 1 to 2,000, found 1000000"),
        ({"hidden_size": 50}, "must be able to build 'llama', found .*hidden size .50. is not a multiple"),
        ({"vocab_size": "9"}, "must be able to build 'llama', found .*vocab_size"),
        ({"num_key_value_heads": 4}, "num_key_value_heads: must divide"),
        ({"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3}, "at most the number .* found 3"),
    ],
)
def test_a_bad_config_is_refused_with_rule_value_and_remedy(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        shape_of({**LLAMA, **values})
    assert len(str(caught.value).splitlines()) == 2


def test_no_code_of_a_models_author_is_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.dynamic_module_utils, "get_class_from_dynamic_module", pytest.fail)
    code = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    with pytest.raises(ModelError, match=r"found 'mine'\. Its auto_map names code of the model's author") as caught:
        shape_of({"model_type": "mine", "auto_map": code})
    assert str(caught.value).endswith(REMEDY)
    assert shape_of({**LLAMA, "auto_map": code}).source.startswith("counted by LlamaForCausalLM of transformers ")


def test_a_missing_package_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModelError, match=r"--model: needs torch and transformers for a config\.json") as caught:
        shape_of({**LLAMA, "num_hidden_layers": 4})
    assert str(caught.value).endswith("\nInstall both. Or give --params with the number of parameters.")


def test_an_unknown_family_is_refused_and_a_known_one_leaves_the_environment_as_it_was() -> None:
    code = """
        import os
        from perf_model.training_run.hf_config import parse_hf_config
        before = set(os.environ)
        try:
            parse_hf_config('{"model_type": "lama"}', "x")
        except ValueError as error:
            print(error)
        parse_hf_config('{"model_type": "llama", "num_hidden_layers": 1}', "x")
        assert set(os.environ) == before
    """
    printed = subprocess.check_output([sys.executable, "-c", textwrap.dedent(code)], cwd=REPOSITORY, text=True)
    rule = "model_type: must be one that the installed transformers has, found 'lama'.\nNear ones: llama"
    assert printed.startswith(rule)
