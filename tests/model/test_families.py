"""Compare the families with transformers: the name, size and order of every parameter, and published figures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from deep_opt_states.meta_model import describe
from perf_model.training_run.families.decoder import gpt
from perf_model.training_run.hf_config import FAMILIES, shape_of
from perf_model.training_run.job import Job
from perf_model.training_run.model import ModelShape, has_weight_decay
from tests.model.hugging_face_configs import PUBLISHED, built, parameters_of, small, unequal

ONE_OF_EACH = {values["model_type"]: values for values in PUBLISHED.values()}

CHANGES: dict[str, list[dict[str, Any]]] = {
    "llama": [{"attention_bias": True}, {"mlp_bias": True}],
    "qwen3": [{"attention_bias": True}],
    "gemma": [{"attention_bias": True}],
    "gemma3_text": [{"attention_bias": True}],
    "phi": [{"qk_layernorm": True}, {"num_key_value_heads": None}],
    "olmo": [{"attention_bias": True}, {"head_dim": 16}],
    "olmo2": [{"attention_bias": True}],
    "gpt2": [{"n_inner": 60}],
    "gpt_neox": [{"attention_bias": False}],
    "mixtral": [{"head_dim": 16}],
    "qwen2_moe": [{"qkv_bias": False}, {"decoder_sparse_step": 2}, {"mlp_only_layers": [0, 2]}],
    "qwen3_moe": [{"attention_bias": True}, {"decoder_sparse_step": 2}, {"mlp_only_layers": [1]}],
    "gpt_oss": [{"attention_bias": False}],
    "deepseek_v2": [{"attention_bias": True}, {"mlp_bias": True}, {"q_lora_rank": None}, {"n_shared_experts": 1}],
    "deepseek_v3": [{"attention_bias": True}, {"q_lora_rank": None}, {"first_k_dense_replace": 0}],
}
"""Values of a config that change which parameters the model has."""


def test_every_family_has_a_published_model() -> None:
    assert ONE_OF_EACH.keys() == FAMILIES.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_has_the_parameters_that_transformers_builds(name: str) -> None:
    model = built(PUBLISHED[name])
    shape = shape_of(PUBLISHED[name], name)
    assert unequal(parameters_of(model), shape.tensors) == []
    assert shape.numel == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("family", "change"),
    [(family, change) for family in FAMILIES for change in [*CHANGES.get(family, []), {"tie_word_embeddings": True}]],
    ids=str,
)
def test_each_value_that_changes_the_parameters_is_counted(family: str, change: dict[str, Any]) -> None:
    values = {**small(ONE_OF_EACH[family]), **change}
    assert unequal(parameters_of(built(values)), shape_of(values, family).tensors) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_formulas_and_transformers_agree_on_active_parameters_and_operations(family: str) -> None:
    """Check the two ways of counting, which are independent, and the names of tied parameters."""
    values = small(ONE_OF_EACH[family])
    shape, found = shape_of(values, family), describe(values)
    assert [list(tensor) for tensor in shape.tensors] == found["parameters"]
    assert [list(pair) for pair in shape.tied] == found["tied"]
    for key in ("layers", "hidden", "vocab", "heads"):
        assert getattr(shape, key) == found[key], key


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("Mixtral-8x7B", 46.7e9, 12.9e9),
        ("Qwen1.5-MoE-A2.7B", 14.3e9, 2.7e9),
        ("Qwen3-30B-A3B", 30.5e9, 3.3e9),
        ("Qwen3-235B-A22B", 235e9, 22e9),
        ("DeepSeek-V2-Lite", 15.7e9, 2.4e9),
        ("DeepSeek-V2", 236e9, 21e9),
        ("DeepSeek-V3", 671e9, 37e9),
    ],
)
def test_a_mixture_has_the_published_totals(name: str, total: float, active: float) -> None:
    """Check the figures of the model cards. That of V2-Lite leaves out one of the two tables of 0.21 B."""
    shape = shape_of(PUBLISHED[name], name)
    without = PUBLISHED[name]["vocab_size"] * PUBLISHED[name]["hidden_size"] if name == "DeepSeek-V2-Lite" else 0
    assert shape.numel == pytest.approx(total, rel=0.004)
    assert shape.active_numel - without == pytest.approx(active, rel=0.025)


@pytest.mark.parametrize(
    ("name", "total", "active"), [("gpt-oss-20b", 20.91e9, 3.61e9), ("gpt-oss-120b", 116.83e9, 5.13e9)]
)
def test_gpt_oss_has_the_totals_of_its_model_card(name: str, total: float, active: float) -> None:
    """Check table 1 of arXiv 2508.10925, which counts the unembedding as active, and the embedding not."""
    shape = shape_of(PUBLISHED[name], name)
    assert shape.numel == pytest.approx(total, abs=0.005e9)
    assert shape.active_numel - shape.vocab * shape.hidden == pytest.approx(active, abs=0.005e9)


def flops_by_hooks(values: dict[str, Any], tokens: int) -> float:
    """Return the operations of the linear layers of a dense model, counted by hooks in one forward."""
    model, counted = built(values).to_empty(device="cpu"), []

    def count(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        # The weight of Conv1D in GPT-2 is transposed, which makes no difference to its size.
        counted.append(2 * module.weight.numel() * output.numel() // output.shape[-1])

    for module in model.modules():
        if type(module).__name__ in ("Linear", "Conv1D"):
            module.register_forward_hook(count)
    model(input_ids=torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
    return sum(counted)


DENSE = ("llama", "qwen2", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "olmo", "olmo2", "gpt2", "gpt_neox")


@pytest.mark.parametrize("family", DENSE)
def test_operations_are_those_of_the_linear_layers_that_forward_calls(family: str) -> None:
    values, tokens = small(ONE_OF_EACH[family]), 8
    shape = shape_of(values, family)
    scores = 2 * tokens * tokens * shape.scores_width
    assert shape.forward_flops(1, tokens) == flops_by_hooks(values, tokens) + scores


def test_scores_are_counted_for_every_layer_and_head() -> None:
    assert shape_of(PUBLISHED["Llama-3-8B"], "").scores_width == 32 * 32 * (128 + 128)
    # Queries and keys of DeepSeek are 192 wide, values 128.
    assert shape_of(PUBLISHED["DeepSeek-V3"], "").scores_width == 61 * 128 * (192 + 128)


def test_memory_counts_all_experts_and_operations_those_of_a_token() -> None:
    """Check Mixtral against the dense Mistral of the same widths: 8 experts are stored, and 2 are computed."""
    mixture, dense = (shape_of(PUBLISHED[name], name) for name in ("Mixtral-8x7B", "Mistral-7B-v0.3"))
    feed_forward = 32 * 3 * 4096 * 14336
    router = 32 * 8 * 4096
    tables = 2 * (32768 - 32000) * 4096
    assert mixture.numel - dense.numel == 7 * feed_forward + router - tables
    assert mixture.active_numel - dense.active_numel == feed_forward + router - tables
    jobs = [Job(shape=shape, world_size=8, ranks_per_node=8, micro_batch=1, sequence=512) for shape in (mixture, dense)]
    assert sum(len(group) for group in jobs[0].sub_groups) == len(mixture.tensors)
    assert 1.5 < jobs[0].forward_s(1e14) / jobs[1].forward_s(1e14) < 2
    assert 6 < mixture.numel / dense.numel < 7


@pytest.mark.parametrize("family", FAMILIES)
def test_first_use_has_every_parameter_once_and_layers_in_order(family: str) -> None:
    shape = shape_of(small(ONE_OF_EACH[family]), family)
    order = shape.first_use()
    assert sorted(order) == sorted(name for name, _ in shape.parameters())
    assert order[0] == shape.tensors[0].name
    layers = [int(part) for name in order for part in name.split(".") if part.isdigit()]
    assert layers == sorted(layers)


def executed(values: dict[str, Any]) -> list[str]:
    """Return the modules with own parameters, in the order in which forward calls them."""
    model, order = built(values).to_empty(device="cpu"), []
    for name, module in model.named_modules():
        if list(module.parameters(recurse=False)):
            module.register_forward_pre_hook(lambda module, inputs, name=name: order.append(name))
    model(input_ids=torch.zeros(1, 8, dtype=torch.long), use_cache=False)
    return order


@pytest.mark.parametrize("family", DENSE)
def test_first_use_calls_the_modules_of_a_layer_as_forward_does(family: str) -> None:
    """Compare attention, feed-forward and norms; inside them, the order of registration is kept."""
    values = small(ONE_OF_EACH[family])

    def parts(names: list[str]) -> list[str]:
        found = [".".join(name.split(".")[:4]) for name in names if ".1." in name]
        return list(dict.fromkeys(found))

    own = [name.rpartition(".")[0] for name in shape_of(values, family).first_use()]
    assert parts(own) == parts(executed(values))


def test_norms_and_biases_have_no_weight_decay_as_in_the_trainer() -> None:
    for family, published in ONE_OF_EACH.items():
        model = built(small(published))
        decayed = set(transformers.Trainer.get_decay_parameter_names(None, model))
        for name, _ in model.named_parameters():
            assert has_weight_decay(name) is (name in decayed), (family, name)


def test_a_gpt_of_the_presets_has_names_like_llama() -> None:
    shape = gpt("GPT", layers=2, hidden=64, heads=4, vocab=100, positions=16)
    assert isinstance(shape, ModelShape)
    assert {name.split(".")[0] for name, _ in shape.parameters()} == {"model"}
