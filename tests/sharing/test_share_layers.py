"""Test ``share_layers``: which parameters are left, their gradients, saving, and the layers that it refuses."""

from __future__ import annotations

import copy
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from deep_opt_states.sharing import SharingError, share_layers
from tests.launch import run_ranks
from tests.sharing.shared_ranks import CASES
from tests.sharing.stack_model import Stack, StackLayer, tokens
from tests.tiers import thorough

SMALL = {
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
}


def llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(2)
    return LlamaForCausalLM(LlamaConfig(**{**SMALL, "use_cache": False, **changes}))


NAMES_OF_STACK = (
    ["embed.weight"],
    ["norm.weight", "norm.bias", "linear.weight", "linear.bias"],
    ["head.weight", "head.bias"],
)
"""The parameters before the layers, in a layer, and after the layers."""


def names_of_llama() -> tuple[list[str], list[str], list[str]]:
    """Return the parameters before the layers, in a layer, and after the layers, in the order of their uses."""
    attention = [f"self_attn.{name}_proj.weight" for name in "qkvo"]
    feed_forward = [f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    in_layer = ["input_layernorm.weight", *attention, "post_attention_layernorm.weight", *feed_forward]
    return ["model.model.embed_tokens.weight"], in_layer, ["model.model.norm.weight", "model.lm_head.weight"]


@pytest.mark.parametrize("world_size", [1, 2, thorough(3)])
@pytest.mark.promise("P1")
def test_shared_layers_train_as_with_stock_and_have_the_gradients_of_torch(world_size: int) -> None:
    for finished in run_ranks(world_size, ["-m", "tests.sharing.shared_ranks"], timeout_s=300):
        assert finished.returncode == 0, finished.output[-4000:]
        found = finished.answers()
        assert len(found) == len(CASES)
        for case in found:
            assert case["unlike stock"] == [], case
            before, in_layer, after = names_of_llama() if case["hugging_face"] else NAMES_OF_STACK
            path = "model.model.layers" if case["hugging_face"] else "model.layers"
            layers = [[f"{path}.{layer}.{name}" for name in in_layer] for layer in range(case["every"])]
            assert case["params"] == sorted([*before, *chain.from_iterable(layers), *after])
            # The states, the 16-bit parameters and the partitions.
            assert case["tensors"] == 5 * len(case["params"]), case
            # Forward, and no recomputation in backward, uses the shared parameters once per layer.
            uses = chain.from_iterable(layers[layer % case["every"]] for layer in range(case["layers"]))
            assert case["uses"] == [*before, *uses, *after]
            # Stock reduces the gradients of a bf16 model in bf16, torch adds up those of fp32.
            assert case["relative distance from torch"] < (1e-6 if case["dtype"] == "fp32" else 0.05), case


@pytest.mark.parametrize(("every", "uses"), [(1, [5]), (2, [3, 2])])
def test_mean_divides_the_sum_of_the_gradients_by_the_number_of_uses(every: int, uses: list[int]) -> None:
    gradients = {}
    for scale in ("sum", "mean"):
        torch.manual_seed(5)
        model = Stack(5)
        share_layers(model, "model.layers", every=every, scale=scale)
        model(tokens(0, 0)).backward()
        gradients[scale] = {name: param.grad for name, param in model.named_parameters()}
    for name, gradient in gradients["sum"].items():
        divisor = uses[int(name.split(".")[2])] if name.startswith("model.layers") else 1
        assert torch.equal(gradient / divisor, gradients["mean"][name]), name
        assert gradient.abs().sum() > 0


def replaced(model: Stack) -> Stack:
    """Replace a parameter, as AutoTP does under ``zero.Init``."""
    linear = model.model.layers[0].linear
    linear.weight = torch.nn.Parameter(linear.weight.detach().clone())
    return model


def unfrozen(model: Stack) -> Stack:
    for param in model.model.layers[0].parameters():
        param.requires_grad_(True)
    return model


@pytest.mark.parametrize(("change", "frozen"), [(replaced, False), (copy.deepcopy, False), (unfrozen, True)])
def test_parameters_that_change_after_sharing_have_mean_gradients(change: Any, frozen: bool) -> None:
    gradients = {}
    for scale in ("sum", "mean"):
        torch.manual_seed(5)
        model = Stack(4)
        for layer in model.model.layers:
            layer.requires_grad_(not frozen)
        share_layers(model, "model.layers", scale=scale)
        model = change(model)
        for _ in range(2):
            model.zero_grad()
            model(tokens(0, 0)).backward()
        gradients[scale] = {name: param.grad for name, param in model.model.named_parameters()}
    for name, gradient in gradients["sum"].items():
        assert torch.equal(gradient / 4, gradients["mean"][name]), name
        assert gradient.abs().sum() > 0


def test_a_hugging_face_model_with_shared_layers_is_saved_once_and_loaded(tmp_path: Path) -> None:
    model = llama()
    share_layers(model, "model.layers", every=2)
    model.save_pretrained(tmp_path)
    other = llama()
    with torch.no_grad():
        for param in other.parameters():
            param.zero_()
    share_layers(other, "model.layers", every=2)
    saved = load_file(tmp_path / "model.safetensors")
    assert {name.split(".")[2] for name in saved if ".layers." in name} == {"0", "1"}
    missing, unexpected = other.load_state_dict(saved, strict=False)
    assert unexpected == []
    assert {name.split(".")[2] for name in missing} == {"2", "3"}
    inputs = torch.arange(10)[None]
    assert torch.equal(model(inputs).logits, other(inputs).logits)
    assert LlamaForCausalLM._tied_weights_keys == {"lm_head.weight": "model.embed_tokens.weight"}


def unequal_shapes() -> Stack:
    model = Stack(3)
    model.model.layers[2].linear = torch.nn.Linear(10, 10, bias=False)
    return model


def unequal_classes() -> Stack:
    model = Stack(3)
    model.model.layers[1].norm = torch.nn.Identity()
    return model


def partly_frozen() -> Stack:
    model = Stack(3)
    model.model.layers[1].linear.weight.requires_grad_(False)
    return model


def shared_before() -> Stack:
    model = Stack(3)
    share_layers(model, "model.layers")
    return model


def wrapped(**changes: Any) -> torch.nn.Module:
    """Return a module without a config around a Hugging Face model, as in models of text and images."""
    return torch.nn.ModuleDict({"inner": llama(**changes)})


def unequal_activations() -> Stack:
    model = Stack(3)
    for layer, activation in zip(model.model.layers, (torch.relu, torch.relu, torch.sigmoid), strict=True):
        layer.activation = activation
    return model


def unequal_sequences() -> Stack:
    model = Stack(3)
    for layer, sizes in zip(model.model.layers, ((1, 2), (1, 2), (1, 3)), strict=True):
        layer.sizes = sizes
    return model


def unequal_buffers() -> Stack:
    model = Stack(3)
    for layer, size in zip(model.model.layers, (2.0, 2.0, 3.0), strict=True):
        layer.register_buffer("window", torch.tensor(size))
    return model


def caching_generation() -> LlamaForCausalLM:
    """Return a model whose ``use_cache`` was set after it was made, when ``generate`` has a config of its own."""
    model = llama(use_cache=True)
    model.config.use_cache = False
    return model


def tied_by_list() -> LlamaForCausalLM:
    model = llama()
    model._tied_weights_keys = ["lm_head.weight"]
    return model


def sliding_windows() -> Qwen2ForCausalLM:
    changes = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2, "use_cache": False}
    return Qwen2ForCausalLM(Qwen2Config(**SMALL, **changes))


def scaled_attention() -> GPT2LMHeadModel:
    shape = {"vocab_size": 11, "n_embd": 8, "n_layer": 3, "n_head": 2, "n_positions": 16, "use_cache": False}
    return GPT2LMHeadModel(GPT2Config(**shape, scale_attn_by_inverse_layer_idx=True))


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (partial(Stack, 3), {"path": "model.layer"}, "no module of this name"),
        (partial(Stack, 3), {"path": "head"}, "a Linear"),
        (partial(Stack, 3), {"every": 3}, "less than the number of layers, 3, found 3"),
        (partial(Stack, 3), {"every": 0}, "at least 1"),
        (partial(Stack, 3), {"scale": "max"}, "found 'max'"),
        (shared_before, {}, "one layer several times"),
        (unequal_shapes, {}, "linear"),
        (unequal_classes, {}, "norm"),
        (partly_frozen, {}, "linear.weight"),
        (partial(llama, use_cache=True), {}, "use_cache: must be False"),
        (partial(wrapped, use_cache=True), {"path": "inner.model.layers"}, "inner.config.use_cache: must be False"),
        (unequal_activations, {}, "activation"),
        (unequal_sequences, {}, "sizes"),
        (unequal_buffers, {}, "window (shape, dtype, digest of the values)"),
        (caching_generation, {}, "generation_config.use_cache: must be False"),
        (tied_by_list, {}, "_tied_weights_keys: must be a dict"),
        (scaled_attention, {"path": "transformer.h"}, "scale_attn_by_inverse_layer_idx"),
        (sliding_windows, {}, "sliding"),
    ],
)
def test_layers_that_cannot_share_are_refused_and_stay_as_they_are(make: Any, options: Any, message: str) -> None:
    model = make()
    before = dict(model.named_parameters())
    with pytest.raises(SharingError) as refused:
        share_layers(model, **{"path": "model.layers", **options})
    assert message in str(refused.value)
    assert "\n" in str(refused.value), "the remedy"
    assert {name: id(param) for name, param in model.named_parameters()} == {n: id(p) for n, p in before.items()}


def test_layers_with_equal_sliding_windows_share() -> None:
    model = sliding_windows()
    # Layers 0 and 1 have full attention, 2 and 3 have a window.
    model.model.layers = torch.nn.ModuleList([model.model.layers[index] for index in (0, 2, 1, 3)])
    share_layers(model, "model.layers", every=2)
    assert model.model.layers[3] is model.model.layers[1]


def test_layers_whose_attributes_are_tensors_or_functions_of_their_own_share() -> None:
    model = Stack(3)
    for layer in model.model.layers:
        layer.scales = [torch.ones(2), torch.zeros(2)]
        layer.activation = lambda x: torch.relu(x)
    share_layers(model, "model.layers")
    assert model.model.layers[2] is model.model.layers[0]


def test_shared_layers_stay_modules_of_their_list() -> None:
    model = torch.nn.Sequential(*(StackLayer() for _ in range(3)))
    wrapper = torch.nn.ModuleDict({"layers": model})
    share_layers(wrapper, "layers")
    assert len(model) == 3
    assert model[2] is model[0]
    assert model(torch.ones(1, 10)).shape == (1, 10)
