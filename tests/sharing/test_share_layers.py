"""Test ``share_layers``: which parameters are left, their gradients, saving, and the layers that it refuses."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from deep_opt_states.sharing import SharingError, share_layers
from tests.ranks import ranks
from tests.sharing.stack_model import BLOCK, SharingCase, Stack, tokens
from tests.tiers import thorough
from tests.zero.parity.training import Block, Record, collect, differences

Tensors = dict[str, torch.Tensor]

STEPS = 3
CASES = (
    SharingCase(layers=5, every=2, scale="sum", checkpointing="non-reentrant"),
    SharingCase(layers=4, checkpointing="reentrant"),
    SharingCase(layers=3, dtype="bf16", zero_init=True, accumulation=2),
    SharingCase(layers=4, every=2, hugging_face=True),
)


def names_of(case: SharingCase) -> tuple[str, list[str], list[str], list[str]]:
    """Return the path of the layers, and the parameters before, in and after them, in the order of their uses."""
    if not case.hugging_face:
        in_layer = ["norm.weight", "norm.bias", "linear.weight", "linear.bias"]
        return "model.layers", ["embed.weight"], in_layer, ["head.weight", "head.bias"]
    attention = [f"self_attn.{name}_proj.weight" for name in "qkvo"]
    feed_forward = [f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    in_layer = ["input_layernorm.weight", *attention, "post_attention_layernorm.weight", *feed_forward]
    after = ["model.model.norm.weight", "model.lm_head.weight"]
    return "model.model.layers", ["model.model.embed_tokens.weight"], in_layer, after


def gradients_of_torch(case: SharingCase, weights: Tensors) -> Tensors:
    """Return the mean gradients of the first window over all ranks, without DeepSpeed, for the initial ``weights``."""
    model = case.make_model()
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(weights[name])
    micro_batches = [(rank, number) for number in range(case.accumulation) for rank in range(dist.get_world_size())]
    for rank, number in micro_batches:
        (model(tokens(rank, number)) / len(micro_batches)).backward()
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def train(case: SharingCase, block: Block) -> tuple[Record, Tensors, Tensors, list[str] | None]:
    """Return the record of the training, the initial weights, and the gradients of the first window, by name.

    The plugin also returns the uses of parameters in forward, with which it predicts its updates.
    """
    config = case.ds_config(block)
    model = case.make_model(config)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    weights = {name: safe_get_full_fp32_param(param).clone() for name, param in model.named_parameters()}
    record, gradients = Record(), {}
    losses = record.numbers["loss"] = []
    for micro_batch in range(STEPS * case.accumulation):
        loss = engine(tokens(dist.get_rank(), micro_batch))
        engine.backward(loss)
        if micro_batch == case.accumulation - 1:
            gradients = {name: safe_get_full_grad(param).clone() for name, param in model.named_parameters()}
        engine.step()
        losses.append(loss.item())
    collect(engine.optimizer, record)
    uses = None if block is None else list(engine.optimizer._running.uses)
    engine.destroy()
    return record, weights, gradients, uses


@pytest.mark.P1
@ranks(1, 2, thorough(3))
def test_shared_layers_train_as_with_stock_and_have_the_gradients_of_torch() -> None:
    for case in CASES:
        # Stock fails under reentrant checkpointing, where a shared parameter's gradient arrives once per use. Without,
        # the gradients are added in the same order, and the division by four uses is exact.
        stock, weights, stock_gradients, _ = train(replace(case, checkpointing="non-reentrant"), None)
        ours, _, our_gradients, uses = train(case, BLOCK)
        assert differences(stock, ours) == [], case
        path, before, in_layer, after = names_of(case)
        layers = [[f"{path}.{layer}.{name}" for name in in_layer] for layer in range(case.every)]
        expected = gradients_of_torch(case, weights)
        assert sorted(expected) == sorted([*before, *chain.from_iterable(layers), *after])
        # The states, the 16-bit parameters and the partitions.
        assert len(stock.tensors) == 5 * len(expected), case
        # Forward, and no recomputation in backward, uses the shared parameters once per layer.
        of_layers = chain.from_iterable(layers[layer % case.every] for layer in range(case.layers))
        assert uses == [*before, *of_layers, *after]
        assert stock_gradients.keys() == our_gradients.keys() == expected.keys()
        for name, gradient in expected.items():
            assert torch.equal(stock_gradients[name], our_gradients[name]), name
            # Stock reduces the gradients of a bf16 model in bf16, torch adds up those of fp32.
            distance = (stock_gradients[name] - gradient).norm() / gradient.norm()
            assert distance < (1e-6 if case.dtype == "fp32" else 0.05), (case, name)


def replaced(model: Stack) -> Stack:
    """Replace a parameter, as AutoTP does under ``zero.Init``."""
    linear = model.model.layers[0].linear
    linear.weight = torch.nn.Parameter(linear.weight.detach().clone())
    return model


def unfrozen(model: Stack) -> Stack:
    model.model.layers[0].requires_grad_(True)
    return model


@pytest.mark.parametrize(
    ("change", "every"), [(lambda model: model, 2), (replaced, 1), (copy.deepcopy, 1), (unfrozen, 1)]
)
def test_mean_divides_the_sum_of_the_gradients_by_the_number_of_uses(change: Any, every: int) -> None:
    """Check also parameters that change after sharing."""
    gradients = {}
    for scale in ("sum", "mean"):
        torch.manual_seed(5)
        model = Stack(5)
        model.model.layers.requires_grad_(change is not unfrozen)
        share_layers(model, "model.layers", every=every, scale=scale)
        model = change(model)
        for _ in range(2):
            model.zero_grad()
            model(tokens(0, 0)).backward()
        gradients[scale] = {name: param.grad for name, param in model.named_parameters()}
    uses = [len(range(layer, 5, every)) for layer in range(every)]
    for name, gradient in gradients["sum"].items():
        divisor = uses[int(name.split(".")[2])] if name.startswith("model.layers") else 1
        assert torch.equal(gradient / divisor, gradients["mean"][name]), name
        assert gradient.abs().sum() > 0


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


# Refusals


def unequal(name: str, values: list[Any]) -> Stack:
    """Return a model whose layers differ in the attribute ``name``."""
    model = Stack(3)
    for layer, value in zip(model.model.layers, values, strict=True):
        setattr(layer, name, value)
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


RELU, SIGMOID = torch.relu, torch.sigmoid


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (partial(Stack, 3), {"path": "model.layer"}, "no module of this name"),
        (partial(Stack, 3), {"path": "head"}, "a Linear"),
        (partial(Stack, 3), {"every": 3}, "less than the number of layers, 3, found 3"),
        (partial(Stack, 3), {"every": 0}, "at least 1"),
        (partial(Stack, 3), {"scale": "max"}, "found 'max'"),
        (shared_before, {}, "one layer several times"),
        (lambda: unequal("linear", [torch.nn.Linear(10, 10, bias=index < 2) for index in range(3)]), {}, "linear"),
        (lambda: unequal("norm", [torch.nn.Identity(), *(torch.nn.LayerNorm(10) for _ in range(2))]), {}, "norm"),
        (partly_frozen, {}, "linear.weight"),
        (partial(llama, use_cache=True), {}, "use_cache: must be False"),
        (partial(wrapped, use_cache=True), {"path": "inner.model.layers"}, "inner.config.use_cache: must be False"),
        (lambda: unequal("activation", [RELU, RELU, SIGMOID]), {}, "activation"),
        (lambda: unequal("sizes", [(1, 2), (1, 2), (1, 3)]), {}, "sizes"),
        (unequal_buffers, {}, "window (shape, dtype, digest of the values)"),
        (caching_generation, {}, "generation_config.use_cache: must be False"),
        (tied_by_list, {}, "_tied_weights_keys: must be a dict"),
        (scaled_attention, {"path": "transformer.h"}, "scale_attn_by_inverse_layer_idx"),
        (sliding_windows, {}, "sliding"),
    ],
)
def test_layers_that_cannot_share_are_refused_and_stay_as_they_are(make: Any, options: Any, message: str) -> None:
    model = make()
    before = {name: id(param) for name, param in model.named_parameters()}
    with pytest.raises(SharingError) as refused:
        share_layers(model, **{"path": "model.layers", **options})
    assert message in str(refused.value)
    assert "\n" in str(refused.value), "the remedy"
    assert {name: id(param) for name, param in model.named_parameters()} == before


def test_layers_with_equal_windows_or_attributes_of_their_own_share() -> None:
    model = sliding_windows()
    # Layers 0 and 1 have full attention, 2 and 3 have a window.
    model.model.layers = torch.nn.ModuleList([model.model.layers[index] for index in (0, 2, 1, 3)])
    share_layers(model, "model.layers", every=2)
    assert model.model.layers[3] is model.model.layers[1]
    stack = unequal("scales", [[torch.ones(2), torch.zeros(2)] for _ in range(3)])
    for layer in stack.model.layers:
        layer.activation = lambda x: torch.relu(x)
    share_layers(stack, "model.layers")
    assert stack.model.layers[2] is stack.model.layers[0]
