"""Test the models that transformers builds: sizes, operations, the order of use, and published figures."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
import transformers

from perf_model.presets.models import MODELS
from perf_model.training_run.decoder import generic_model
from perf_model.training_run.hf_config import parse_hf_config
from perf_model.training_run.job import Job
from perf_model.training_run.model import ModelShape, has_weight_decay
from tests.model.hugging_face_configs import PUBLISHED, built, config, small

ONE_OF_EACH = {values["model_type"]: values for values in PUBLISHED.values()}


@cache
def _shape_of(config: str, name: str) -> ModelShape:
    return parse_hf_config(config, name)


def shape_of(values: dict[str, Any], name: str) -> ModelShape:
    return _shape_of(json.dumps(values), name)


PRESETS = {
    "Llama-3-8B": PUBLISHED["Llama-3-8B"],
    "Llama-3-70B": config("llama", 8192, 28672, 80, 64, 8, 128256),
    "Qwen2.5-7B": PUBLISHED["Qwen2.5-7B"],
    "Qwen3-4B": config("qwen3", 2560, 9728, 36, 32, 8, 151936, head_dim=128, tie_word_embeddings=True),
    "Qwen3-30B-A3B": PUBLISHED["Qwen3-30B-A3B"],
    "Gemma-2-9B": PUBLISHED["gemma-2-9b"],
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_parameters_and_sizes_that_transformers_builds(name: str) -> None:
    assert replace(shape_of(PRESETS[name], name), source="") == MODELS[name]


@pytest.mark.parametrize("tied", [True, False])
def test_params_are_a_model_that_transformers_builds(tied: bool) -> None:
    """Check the names and sizes of ``--params``, whose embeddings are tied if the model is small."""
    shape = generic_model(10**9 if tied else 10**10)
    sizes = (shape.hidden, shape.intermediate, shape.layers, shape.heads, shape.kv_heads, shape.vocab)
    values = config("llama", *sizes, tie_word_embeddings=tied)
    built = shape_of(values, shape.name)
    names = [tensor.name for tensor in shape.tensors if tensor.name != "model.rest"]
    assert [tensor.name for tensor in built.tensors] == names
    assert built.tied == shape.tied
    assert built.numel == pytest.approx(shape.numel, rel=0.001)


@pytest.mark.parametrize(
    ("name", "heads", "kv_heads", "head_dim", "intermediate", "scores_width", "tensors", "numel"),
    [
        ("Llama-3-8B", 32, 8, 128, 14336, 262144, 291, 8_030_261_248),
        ("Mistral-7B-v0.3", 32, 8, 128, 14336, 262144, 291, 7_248_023_552),
        ("Qwen2.5-7B", 28, 4, 128, 18944, 200704, 339, 7_615_616_512),
        ("Qwen3-8B", 32, 8, 128, 12288, 294912, 399, 8_190_735_360),
        ("gemma-7b", 16, 16, 256, 24576, 229376, 254, 8_537_680_896),
        ("gemma-2-9b", 16, 8, 256, 14336, 344064, 464, 9_241_705_984),
        ("gemma-3-1b", 4, 1, 256, 6912, 53248, 340, 999_885_952),
        ("phi-2", 32, 32, 80, 10240, 163840, 453, 2_779_683_840),
        ("Phi-3-mini-4k", 32, 32, 96, 8192, 196608, 195, 3_821_079_552),
        ("phi-4", 40, 10, 128, 17920, 409600, 243, 14_659_507_200),
        ("OLMo-7B", 32, 32, 128, 11008, 262144, 226, 6_888_095_744),
        ("OLMo-2-7B", 32, 32, 128, 11008, 262144, 355, 7_298_617_344),
        ("gpt2-xl", 25, 25, 64, 6400, 153600, 580, 1_557_611_200),
        ("pythia-6.9b", 32, 32, 128, 16384, 262144, 388, 6_857_302_016),
        ("Mixtral-8x7B", 32, 8, 128, 28672, 262144, 291, 46_702_792_704),
        ("Qwen1.5-MoE-A2.7B", 16, 16, 128, 11264, 98304, 387, 14_315_784_192),
        ("Qwen3-30B-A3B", 32, 4, 128, 6144, 393216, 531, 30_532_122_624),
        ("Qwen3-235B-A22B", 64, 4, 128, 12288, 1540096, 1037, 235_093_634_560),
        ("gpt-oss-20b", 64, 8, 64, 11520, 196608, 411, 20_914_757_184),
        ("gpt-oss-120b", 64, 8, 64, 11520, 294912, 615, 116_829_156_672),
        ("DeepSeek-V2-Lite", 16, 16, 128, 11264, 138240, 351, 15_706_484_224),
        ("DeepSeek-V2", 128, 128, 128, 12288, 2457600, 900, 235_741_434_880),
        ("DeepSeek-V3", 128, 128, 128, 18432, 2498560, 909, 671_026_404_352),
    ],
)
def test_a_published_model_has_the_sizes_of_its_formula(
    name: str, heads: int, kv_heads: int, head_dim: int, intermediate: int, scores_width: int, tensors: int, numel: int
) -> None:
    """Check the figures that version 0.2.0 counted by a formula of each family. Widths count the experts of a token."""
    shape = shape_of(PUBLISHED[name], name)
    assert (shape.heads, shape.kv_heads, shape.head_dim, shape.intermediate) == (
        heads,
        kv_heads,
        head_dim,
        intermediate,
    )
    assert (shape.scores_width, len(shape.tensors), shape.numel) == (scores_width, tensors, numel)


@pytest.mark.parametrize(
    ("name", "active", "tables", "tolerance"),
    [
        ("Mixtral-8x7B", 12.9e9, 2, 0.32e9),
        ("Qwen1.5-MoE-A2.7B", 2.7e9, 2, 0.06e9),
        ("Qwen3-30B-A3B", 3.3e9, 2, 0.08e9),
        ("Qwen3-235B-A22B", 22e9, 2, 0.55e9),
        ("DeepSeek-V2-Lite", 2.4e9, 1, 0.06e9),
        ("DeepSeek-V2", 21e9, 2, 0.52e9),
        ("DeepSeek-V3", 37e9, 2, 0.92e9),
        # Table 1 of arXiv 2508.10925.
        ("gpt-oss-20b", 3.61e9, 1, 0.005e9),
        ("gpt-oss-120b", 5.13e9, 1, 0.005e9),
    ],
)
def test_a_mixture_has_the_published_active_parameters(name: str, active: float, tables: int, tolerance: float) -> None:
    """Check the figures of the model cards, some of which count only one of the embedding and the unembedding."""
    shape = shape_of(PUBLISHED[name], name)
    assert shape.active_numel - (2 - tables) * shape.vocab * shape.hidden == pytest.approx(active, abs=tolerance)


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
    assert 1.5 < jobs[0].work.forward_flops / jobs[1].work.forward_flops < 2
    assert 6 < mixture.numel / dense.numel < 7


@pytest.mark.parametrize("family", ONE_OF_EACH)
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


def test_the_layers_of_two_lists_are_used_one_list_after_the_other() -> None:
    def names(modules: tuple[str, ...]) -> list[str]:
        layers = product(("vision.layers", "text.layers"), range(2), modules)
        return [f"{path}.{number}.{module}.weight" for path, number, module in layers]

    tensor = MODELS["7B"].tensors[0]
    registered = names(("self_attn", "mlp", "input_layernorm"))
    shape = replace(MODELS["7B"], tensors=tuple(tensor._replace(name=name) for name in registered))
    assert shape.first_use() == names(("input_layernorm", "self_attn", "mlp"))
