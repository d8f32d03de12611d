"""Test ``--params``: a dense model with exactly so many parameters, and a model that only transformers can build."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from deep_opt_states.meta_model import describe
from perf_model.__main__ import main
from perf_model.training_run import meta_model
from perf_model.training_run.generic_model import MIN_PARAMETERS, generic_model
from perf_model.training_run.hf_config import parse_hf_config
from perf_model.training_run.model import MAX_PARAMETERS, ModelError
from tests.cli.test_planning_commands import job
from tests.model.hugging_face_configs import parameters_of


@given(st.integers(MIN_PARAMETERS, MAX_PARAMETERS) | st.integers(MIN_PARAMETERS, 10**10))
def test_a_generic_model_has_exactly_the_number_of_parameters(numel: int) -> None:
    shape = generic_model(numel)
    assert shape.numel == shape.active_numel == numel
    looked_up = 0 if shape.aliases else shape.vocab * shape.hidden
    assert shape.multiplied_numel + looked_up == pytest.approx(numel, rel=0.01)


@given(st.integers(10**9, 10**12), st.none() | st.integers(1, 2_000), st.none() | st.integers(1, 10**5))
def test_layers_and_width_of_a_generic_model_are_those_that_are_given(
    numel: int, layers: int | None, hidden: int | None
) -> None:
    try:
        shape = generic_model(numel, layers, hidden)
    except ModelError:
        return
    assert shape.numel == numel
    assert shape.layers == (layers or shape.layers)
    assert shape.hidden == (hidden or shape.hidden)


@pytest.mark.parametrize(("numel", "layers", "hidden"), [(8.03e9, 32, 4096), (70.6e9, 80, 8192), (405.9e9, 126, 16384)])
def test_default_widths_are_close_to_those_of_llama_3(numel: float, layers: int, hidden: int) -> None:
    shape = generic_model(int(numel))
    assert shape.layers == pytest.approx(layers, rel=0.15)
    assert shape.hidden == pytest.approx(hidden, rel=0.15)


@pytest.mark.parametrize("numel", [1e8, 2e8, 1e9, 7e9, 32e9, 32.8e9, 1e12])
def test_eight_tensor_parallel_ranks_can_divide_the_heads(numel: float) -> None:
    shape = generic_model(int(numel))
    assert shape.heads % 8 == 0
    assert shape.kv_heads % 8 == 0


def test_plan_states_the_widths_that_are_assumed_for_params(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", *job()[:2], "--params", "32e9", *job()[4:], "--unit-size", "1000000000"]
    assert main([*arguments, "--host-memory-gb", "900"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "32B (32.00 B parameters) on 4 x H100-80GB" in shown
    assert "model: a generic dense model with 55 layers of width 7,168, feed-forwards of 20,039" in shown
    assert main([*arguments, "--layers", "64", "--hidden", "5120", "--host-memory-gb", "900"]) == 0
    assert "64 layers of width 5,120" in " ".join(capsys.readouterr().out.split())


# Models without a formula

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


def test_a_family_without_a_formula_is_built_by_transformers_in_a_child_process(tmp_path: Path) -> None:
    path = tmp_path / "granite" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(GRANITE_MOE))
    shape = parse_hf_config(path.read_text(), path.parent.name)
    config = transformers.GraniteMoeConfig.from_dict(GRANITE_MOE)
    with torch.device("meta"):
        model = transformers.GraniteMoeForCausalLM(config)
    assert shape.parameters() == parameters_of(model)
    experts = sum(numel for name, numel in shape.parameters() if ".experts." in name)
    assert experts == 3 * 8 * 3 * 64 * 96
    assert shape.numel - shape.active_numel == experts * 6 // 8
    assert (shape.layers, shape.hidden, shape.vocab, shape.heads, shape.kv_heads) == (3, 64, 300, 4, 2)
    assert shape.source == f"counted by GraniteMoeForCausalLM of transformers {transformers.__version__}"
    assert shape.aliases == {}


def test_a_model_for_images_is_counted_whole_and_its_encoder_computes_nothing_for_a_text() -> None:
    found = describe(GEMMA3)
    rows = {name: (numel, multiplied) for name, numel, _, multiplied in found["parameters"]}
    encoder = {name for name in rows if "vision_tower" in name}
    with torch.device("meta"):
        model = transformers.Gemma3ForConditionalGeneration(transformers.Gemma3Config.from_dict(GEMMA3))
    assert [(name, numel) for name, (numel, _) in rows.items()] == parameters_of(model)
    assert len(encoder) > 10
    assert not any(rows[name][1] for name in encoder)
    assert rows["model.language_model.layers.1.mlp.up_proj.weight"] == (48 * 100, True)
    assert (found["layers"], found["hidden"], found["vocab"]) == (2, 48, 211)


def test_an_encoder_with_a_decoder_is_counted_whole() -> None:
    found = describe(T5)
    assert (
        sum(row[1] for row in found["parameters"])
        == transformers.T5ForConditionalGeneration(transformers.T5Config.from_dict(T5)).num_parameters()
    )
    assert all(row[3] for row in found["parameters"] if row[0].endswith((".q.weight", ".wo.weight")))


def test_no_code_of_a_models_author_is_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a config of an unknown family, with a reference to code, is refused without the code."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "get_class_from_dynamic_module", pytest.fail)
    values = {"model_type": "mine", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}
    with pytest.raises(KeyError, match="mine"):
        describe(values)
    known = describe({**GRANITE_MOE, "auto_map": {"AutoModelForCausalLM": "code.Model"}})
    assert known["source"].startswith("GraniteMoeForCausalLM of transformers")


ERROR = "model_type: 'unheard' has no formula here, so transformers must be able to build the model, found "
REMEDY = "Give --params with the number of parameters, in place of --model."


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        pytest.param("deep_opt_states.meta_model", "KeyError: 'unheard'", marks=pytest.mark.thorough),
        ("deep_opt_states.no_such_module", "a child process that failed with exit code 1 ("),
    ],
)
def test_a_model_that_cannot_be_built_is_refused_with_the_remedy(
    program: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meta_model, "PROGRAM", program)
    with pytest.raises(ModelError) as caught:
        parse_hf_config(json.dumps({"model_type": "unheard"}), "unheard")
    rule, remedy = str(caught.value).splitlines()
    assert rule.startswith(ERROR + expected)
    assert remedy == REMEDY


def test_a_family_that_only_remote_code_knows_is_refused_with_a_note_that_the_code_is_not_executed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(meta_model, "_run", lambda config: {"error": "KeyError: 'unheard'"})
    config = {"model_type": "unheard", "auto_map": {"AutoModelForCausalLM": "code.Model"}}
    with pytest.raises(ModelError) as caught:
        parse_hf_config(json.dumps(config), "unheard")
    rule, remedy = str(caught.value).splitlines()
    assert rule == f"{ERROR}KeyError: 'unheard'. Its auto_map names code of the model's author, which is not executed."
    assert remedy == REMEDY


def test_a_child_process_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meta_model, "TIME_LIMIT_S", 0.01)
    with pytest.raises(ModelError, match=r"found no model after 0\.01 s"):
        parse_hf_config(json.dumps({"model_type": "unheard"}), "unheard")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"error": "transformers cannot be imported"}, "found transformers cannot be imported.\n"),
        ({"layers": 0, "hidden": 8, "vocab": 8}, "layers of 'unheard', in transformers: must be an integer from 1"),
        ({"layers": 8, "hidden": 8, "vocab": 0}, "vocab of 'unheard', in transformers: must be an integer from 1"),
    ],
)
def test_an_answer_without_a_model_is_refused_with_the_remedy(
    answer: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meta_model, "_run", lambda config: answer)
    with pytest.raises(ModelError) as caught:
        parse_hf_config(json.dumps({"model_type": "unheard"}), "unheard")
    assert expected in str(caught.value)
    assert str(caught.value).endswith(REMEDY)
