"""Test the shapes of models: read from Hugging Face configs, and counted as in the papers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from perf_model.training_run.decoder import gpt
from perf_model.training_run.hf_config import parse_hf_config, read_hf_config
from perf_model.training_run.model import ModelError, ModelShape
from tests.cluster.paper_formulas import gpt_iteration_flops, gpt_numel

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


def parameters_of(config: Any) -> list[tuple[str, int]]:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return [(name, parameter.numel()) for name, parameter in model.named_parameters()]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", [*LLAMA_LIKE, "GPT2", "GPTNeoX"])
def test_every_parameter_of_a_hugging_face_model_is_counted(family: str, tied: bool) -> None:
    config = config_of(family, tie_word_embeddings=tied)
    shape = parse_hf_config(config.to_json_string(), name=family)
    assert shape.parameters() == parameters_of(config)
    assert bool(shape.tied) is tied


# As many heads as every family's default of key-value heads divides.
OPEN = {**SMALL, "hidden_size": 64, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 4}


@pytest.mark.parametrize("key", ["num_key_value_heads", "head_dim"])
@pytest.mark.parametrize("family", LLAMA_LIKE)
def test_a_key_that_a_config_leaves_out_has_the_default_of_hugging_face(family: str, key: str) -> None:
    values = {name: value for name, value in OPEN.items() if name != key}
    shape = parse_hf_config(json.dumps({"model_type": family.lower(), **values}), name=family)
    assert shape.parameters() == parameters_of(getattr(transformers, f"{family}Config")(**values))


def test_a_config_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    text = json.dumps({"model_type": "llama", **SMALL})
    path = tmp_path / "config.json"
    path.write_text(text, encoding="utf-8-sig")
    assert read_hf_config(path) == parse_hf_config(text, tmp_path.name)


def test_a_published_model_has_its_published_size(tmp_path: Path) -> None:
    """Check Llama 3 8B, which has 8,030,261,248 parameters (8.03 B on the model card)."""
    config = transformers.LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    path = tmp_path / "Llama-3-8B" / "config.json"
    path.parent.mkdir()
    path.write_text(config.to_json_string())
    shape = read_hf_config(path)
    assert shape.name == "Llama-3-8B"
    assert shape.numel == 8_030_261_248


# Megatron-LM, arXiv 2104.04473


@given(st.integers(1, 100), st.integers(1, 100), st.integers(1000, 60_000), st.integers(1, 512), st.integers(64, 4096))
def test_gpt_shapes_give_the_papers_numbers(layers: int, heads: int, vocab: int, batch: int, sequence: int) -> None:
    hidden = 64 * heads
    shape = gpt("GPT", layers, hidden, heads, vocab, sequence)
    numel = gpt_numel(layers, hidden, vocab, sequence)
    flops = gpt_iteration_flops(layers, hidden, vocab, sequence, batch)
    # The formula of the paper leaves out the last normalisation, which has 2 * hidden parameters.
    assert shape.numel - 2 * hidden == pytest.approx(numel, rel=1e-9)
    assert shape.iteration_flops(batch, sequence, recompute=True) == pytest.approx(flops, rel=1e-9)


def test_without_recomputation_the_layers_count_three_times_instead_of_four() -> None:
    shape = gpt("GPT", 24, 2048, 16, 51200, 1024)
    logits = 2 * 8 * 1024 * 2048 * 51200
    with_it, without = (shape.iteration_flops(8, 1024, recompute) for recompute in (True, False))
    assert (with_it - 3 * logits) / (without - 3 * logits) == pytest.approx(4 / 3)
    assert without == 3 * shape.forward_flops(8, 1024)


# Refused configs


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "A model's config must be JSON"),
        ("[]", "A model's config must be an object"),
        ("{}", "model_type: must name the family of the model, found None"),
        (json.dumps({"model_type": ["llama"]}), "model_type: must name the family of the model, found "),
        ('{"model_type": "llama", "model_type": "qwen2"}', "the key 'model_type' occurs twice in one object"),
        ('{"model_type": "unheard"}', "must be one that the installed transformers has, found 'unheard'"),
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
