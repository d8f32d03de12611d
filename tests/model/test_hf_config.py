"""Test the models that are read from Hugging Face configs, and the configs that are refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from perf_model.training_run.hf_config import _families, parse_hf_config, read_hf_config
from perf_model.training_run.model import ModelError, ModelShape
from tests.model.hugging_face_configs import parameters_of

LLAMA_LIKE = ("Llama", "Mistral", "Qwen2", "Qwen3")


SMALL = {
    "hidden_size": 48,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 211,
}


GPT2 = {"n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 77, "vocab_size": 211}


def config_of(family: str, **changes: Any) -> Any:
    values = {**SMALL, **changes}
    if family == "GPT2":
        values = {**GPT2, **changes}
    if family == "GPTNeoX":
        del values["num_key_value_heads"], values["head_dim"]
    return getattr(transformers, f"{family}Config")(**values)


def parameters_of_config(config: Any) -> list[tuple[str, int]]:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return [(name, parameter.numel()) for name, parameter in model.named_parameters()]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", [*LLAMA_LIKE, "GPT2", "GPTNeoX"])
def test_every_parameter_of_a_hugging_face_model_is_counted(family: str, tied: bool) -> None:
    config = config_of(family, tie_word_embeddings=tied)
    shape = parse_hf_config(config.to_json_string(), name=family)
    assert shape.parameters() == parameters_of_config(config)
    assert bool(shape.tied) is tied


# As many heads as every family's default of key-value heads divides.
OPEN = {**SMALL, "hidden_size": 64, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 4}


@pytest.mark.parametrize("key", ["num_key_value_heads", "head_dim"])
@pytest.mark.parametrize("family", LLAMA_LIKE)
def test_a_key_that_a_config_leaves_out_has_the_default_of_hugging_face(family: str, key: str) -> None:
    values = {name: value for name, value in OPEN.items() if name != key}
    shape = parse_hf_config(json.dumps({"model_type": family.lower(), **values}), name=family)
    assert shape.parameters() == parameters_of_config(getattr(transformers, f"{family}Config")(**values))


def test_a_config_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    text = json.dumps({"model_type": "llama", **SMALL})
    path = tmp_path / "config.json"
    path.write_text(text, encoding="utf-8-sig")
    assert read_hf_config(path) == parse_hf_config(text, tmp_path.name)


# Refused configs


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "A model's config must be JSON"),
        ("[]", "A model's config must be an object"),
        ("{}", "model_type: must name the family of the model, found None"),
        (json.dumps({"model_type": ["llama"]}), "model_type: must name the family of the model, found "),
        ('{"model_type": "llama", "model_type": "qwen2"}', "the key 'model_type' occurs twice in one object"),
        *(
            (json.dumps({"model_type": "llama", **SMALL, key: value}), message)
            for key, value, message in (
                ("vocab_size", 10**18, "vocab of 'llama': must be an integer from 1 to 100,000,000, found 10"),
                ("num_hidden_layers", 10**6, "layers of 'llama': must be an integer from 1 to 2,000, found 1000000"),
                ("hidden_size", 10**30, "must be able to build 'llama', found .*hidden size"),
                ("hidden_size", 50, "must be able to build 'llama', found .*hidden size .50. is not a multiple"),
                ("intermediate_size", 10**4000, "must be able to build 'llama', found .*Overflow"),
                ("vocab_size", "9", "must be able to build 'llama', found .*vocab_size"),
                ("vocab_size", True, "must be able to build 'llama', found .*vocab_size"),
                ("tie_word_embeddings", 1, "must be able to build 'llama', found .*tie_word_embeddings"),
            )
        ),
        (json.dumps({"model_type": "llama", **SMALL, "num_key_value_heads": 4}), "num_key_value_heads: must divide"),
        (
            json.dumps({"model_type": "mixtral", **SMALL, "num_local_experts": 2, "num_experts_per_tok": 3}),
            "experts per token: must be at most the number of experts, 2, found 3",
        ),
        (json.dumps({"model_type": "gpt2", **GPT2, "n_embd": 50}), "must be divisible by num_heads"),
        (json.dumps({"model_type": "gpt_neox", **SMALL, "attention_bias": 0}), "found .*attention_bias"),
    ],
)
def test_a_bad_config_is_refused_with_rule_value_and_remedy(text: str, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        parse_hf_config(text, name="bad")
    assert len(str(caught.value).splitlines()) == 2


def test_a_config_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"must be a preset or a readable config\.json"):
        read_hf_config(tmp_path / "none.json")
    with pytest.raises(ModelError, match=r"must be a preset or a readable config\.json"):
        read_hf_config(Path("\0"))


json_values = st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | st.text(max_size=3) | st.lists(st.none())


@given(st.sampled_from(["llama", "qwen2", "gpt2", "gpt_neox", "mixtral", "deepseek_v3", None, 3]), st.data())
def test_a_malformed_config_raises_model_error_and_no_other_error(family: Any, data: st.DataObject) -> None:
    keys = [*SMALL, "n_embd", "n_layer", "n_head", "n_positions", "n_inner", "tie_word_embeddings", "attention_bias"]
    values = {"model_type": family, **SMALL, **data.draw(st.dictionaries(st.sampled_from(keys), json_values))}
    try:
        shape = parse_hf_config(json.dumps(values), name="drawn")
    except ModelError:
        return
    assert isinstance(shape, ModelShape)
    assert shape.numel > 0


GRANITE_MOE = {
    "model_type": "granitemoe",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 300,
}


GEMMA3 = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 48,
        "intermediate_size": 100,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 211,
    },
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 28,
        "patch_size": 14,
    },
    "mm_tokens_per_image": 4,
}


T5 = {"model_type": "t5", "d_model": 64, "d_ff": 128, "d_kv": 16, "num_heads": 4, "num_layers": 2, "vocab_size": 300}


def shape_of(values: dict[str, Any]) -> ModelShape:
    return parse_hf_config(json.dumps(values), "tested")


def test_all_experts_are_counted_and_those_of_a_token_are_active() -> None:
    shape = shape_of(GRANITE_MOE)
    config = transformers.GraniteMoeConfig.from_dict(GRANITE_MOE)
    with torch.device("meta"):
        model = transformers.GraniteMoeForCausalLM(config)
    assert shape.parameters() == parameters_of(model)
    experts = sum(numel for name, numel in shape.parameters() if ".experts." in name)
    assert experts == 3 * 8 * 3 * 64 * 96
    assert shape.numel - shape.active_numel == experts * 6 // 8
    assert (shape.layers, shape.hidden, shape.vocab, shape.heads, shape.kv_heads) == (3, 64, 300, 4, 2)
    assert shape.source == f"counted by GraniteMoeForCausalLM of transformers {transformers.__version__}"
    assert shape.tied == ()


def test_a_model_for_images_is_counted_whole_and_its_encoder_computes_nothing_for_a_text() -> None:
    shape = shape_of(GEMMA3)
    rows = {tensor.name: (tensor.numel, tensor.multiplied) for tensor in shape.tensors}
    encoder = {name for name in rows if "vision_tower" in name}
    with torch.device("meta"):
        model = transformers.Gemma3ForConditionalGeneration(transformers.Gemma3Config.from_dict(GEMMA3))
    assert shape.parameters() == parameters_of(model)
    assert len(encoder) > 10
    assert not any(rows[name][1] for name in encoder)
    assert rows["model.language_model.layers.1.mlp.up_proj.weight"] == (48 * 100, True)
    assert (shape.layers, shape.hidden, shape.vocab) == (2, 48, 211)


def test_an_encoder_with_a_decoder_is_counted_whole() -> None:
    shape = shape_of(T5)
    expected = transformers.T5ForConditionalGeneration(transformers.T5Config.from_dict(T5)).num_parameters()
    assert shape.numel == expected
    assert all(tensor.multiplied for tensor in shape.tensors if tensor.name.endswith((".q.weight", ".wo.weight")))


REMEDY = "Give --params with the number of parameters, in place of --model."


def test_no_code_of_a_models_author_is_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a config of an unknown family, with a reference to code, is refused without the code."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "get_class_from_dynamic_module", pytest.fail)
    code = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    with pytest.raises(ModelError) as caught:
        shape_of({"model_type": "mine", "auto_map": code})
    rule, remedy = str(caught.value).splitlines()
    assert rule == (
        "model_type: must be one that the installed transformers has, found 'mine'. "
        "Its auto_map names code of the model's author, which is not executed."
    )
    assert remedy.endswith(REMEDY)
    assert shape_of({**GRANITE_MOE, "auto_map": code}).source.startswith("counted by GraniteMoeForCausalLM")


def test_an_unknown_family_is_refused_with_near_ones_and_without_an_import() -> None:
    code = (
        "import sys\nfrom perf_model.training_run.hf_config import parse_hf_config\n"
        "try:\n    parse_hf_config('{\"model_type\": \"lama\"}', 'x')\n"
        "except ValueError as error:\n    print(error)\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    folder = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(
        "model_type: must be one that the installed transformers has, found 'lama'.\nNear ones: llama"
    )


def test_every_family_of_transformers_is_known() -> None:
    assert set(transformers.CONFIG_MAPPING) <= _families()


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_a_missing_package_is_named_with_the_remedy(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ModelError) as caught:
        shape_of(GRANITE_MOE)
    rule, remedy = str(caught.value).splitlines()
    assert rule.startswith("--model: needs torch and transformers for a config.json, found none: import of")
    assert remedy == "Install both. Or give --params with the number of parameters."


@pytest.mark.parametrize("changes", [{"num_hidden_layers": 0}, {"num_hidden_layers": 10**6}, {"vocab_size": 10**9}])
def test_impossible_sizes_are_refused_before_a_model_is_built(
    changes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_config", pytest.fail)
    with pytest.raises(ModelError, match=r"of 'granitemoe': must be an integer from 1 to") as caught:
        shape_of({**GRANITE_MOE, **changes})
    assert str(caught.value).endswith(REMEDY)


def test_reading_a_config_leaves_the_environment_as_it_was() -> None:
    code = (
        "import os, json\nbefore = dict(os.environ)\n"
        "from perf_model.training_run.hf_config import parse_hf_config\n"
        "parse_hf_config(json.dumps({'model_type': 'llama', 'num_hidden_layers': 1}), 'x')\n"
        "assert 'transformers' in __import__('sys').modules\n"
        "assert os.environ.keys() == before.keys(), os.environ.keys() - before.keys()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
