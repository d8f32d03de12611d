"""Test ``share_layers``: training, gradients and saving with it, and the layers that it refuses."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial, reduce
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from deep_opt_states.sharing import SharingError, share_layers
from tests.ranks import ranks
from tests.sharing.stack_model import BLOCK, SharingCase, Stack, make_engine, tokens, train
from tests.tiny_llama import tiny_llama
from tests.zero.parity.training import Block, Record, assert_same_bits

STEPS = 3
CASES = (
    SharingCase(layers=5, every=2, scale="sum", checkpointing="non-reentrant"),
    SharingCase(layers=4, checkpointing="reentrant"),
    SharingCase(layers=3, dtype="bf16", zero_init=True, accumulation=2),
    SharingCase(layers=4, every=2, hugging_face=True),
)


def names_of(case: SharingCase) -> tuple[str, list[str], list[str], list[str]]:
    if not case.hugging_face:
        in_layer = ["norm.weight", "norm.bias", "linear.weight", "linear.bias"]
        return "model.layers", ["embed.weight"], in_layer, ["head.weight", "head.bias"]
    attention = [f"self_attn.{name}_proj.weight" for name in "qkvo"]
    feed_forward = [f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    in_layer = ["input_layernorm.weight", *attention, "post_attention_layernorm.weight", *feed_forward]
    after = ["model.model.norm.weight", "model.lm_head.weight"]
    return "model.model.layers", ["model.model.embed_tokens.weight"], in_layer, after


def train_case(case: SharingCase, block: Block) -> tuple[Record, list[str] | None]:
    """Return the record of the training, and of the plugin the uses of parameters with which it predicts updates."""
    model = case.make_model(case.ds_config(block))
    engine = make_engine(case, model, block)
    record = train(engine, STEPS * case.accumulation)
    uses = None if block is None else list(engine.optimizer._running.uses)
    engine.destroy()
    return record, uses


@pytest.mark.P1
@ranks(2)
def test_shared_layers_train_as_with_stock_and_are_used_once_per_layer() -> None:
    for case in CASES:
        # Stock fails under reentrant checkpointing, where a shared parameter's gradient arrives once per use. Without,
        # the gradients are added in the same order, and the division by four uses is exact.
        stock, _ = train_case(replace(case, checkpointing="non-reentrant"), None)
        ours, uses = train_case(case, BLOCK)
        assert_same_bits(stock, ours)
        path, before, in_layer, after = names_of(case)
        layers = [[f"{path}.{layer}.{name}" for name in in_layer] for layer in range(case.every)]
        # The states, the 16-bit parameters, the partitions and the last gradients.
        assert len(stock.tensors) == 6 * len([*before, *chain.from_iterable(layers), *after]), case
        # Forward, and no recomputation in backward, uses the shared parameters once per layer.
        of_layers = chain.from_iterable(layers[layer % case.every] for layer in range(case.layers))
        assert uses == [*before, *of_layers, *after]


@pytest.mark.parametrize(("change", "every"), [("nothing", 2), ("replaced", 1), ("copied", 1), ("unfrozen", 1)])
def test_mean_divides_the_sum_of_the_gradients_by_the_number_of_uses(change: str, every: int) -> None:
    """Check also parameters that change after sharing. AutoTP replaces them under ``zero.Init``."""
    gradients = {}
    for scale in ("sum", "mean"):
        torch.manual_seed(5)
        model = Stack(5)
        model.model.layers.requires_grad_(change != "unfrozen")
        share_layers(model, "model.layers", every=every, scale=scale)
        model = copy.deepcopy(model) if change == "copied" else model
        model.model.layers.requires_grad_(True)
        linear = model.model.layers[0].linear
        if change == "replaced":
            linear.weight = torch.nn.Parameter(linear.weight.detach().clone())
        for _ in range(2):
            model.zero_grad()
            model(tokens(0, 0)).backward()
        gradients[scale] = {name: param.grad for name, param in model.named_parameters()}
    uses = [len(range(layer, 5, every)) for layer in range(every)]
    for name, gradient in gradients["sum"].items():
        divisor = uses[int(name.split(".")[2])] if name.startswith("model.layers") else 1
        assert torch.equal(gradient / divisor, gradients["mean"][name]), name
        assert gradient.abs().sum() > 0


def llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(2)
    return tiny_llama(**{"num_hidden_layers": 4, "use_cache": False, **changes}).model


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


def unequal(name: str, values: list[Any]) -> Stack:
    model = Stack(3)
    for layer, value in zip(model.model.layers, values, strict=True):
        setattr(layer, name, value)
    return model


def changed(model: Any, place: str, value: object) -> Any:
    *owners, name = place.split(".")
    setattr(reduce(getattr, owners, model), name, value)
    return model


def shared() -> Stack:
    model = Stack(3)
    share_layers(model, "model.layers")
    return model


def sliding_windows() -> Qwen2ForCausalLM:
    shape = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 4, "use_cache": False}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16}
    windows = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}
    return Qwen2ForCausalLM(Qwen2Config(**shape, **heads, **windows))


def scaled_attention() -> GPT2LMHeadModel:
    shape = {"vocab_size": 11, "n_embd": 8, "n_layer": 3, "n_head": 2, "n_positions": 16, "use_cache": False}
    return GPT2LMHeadModel(GPT2Config(**shape, scale_attn_by_inverse_layer_idx=True))


RELU, SIGMOID = torch.relu, torch.sigmoid
WINDOWS = [torch.nn.Buffer(size) for size in torch.tensor([2, 2, 3])]


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (partial(Stack, 3), {"path": "model.layer"}, "no module of this name"),
        (partial(Stack, 3), {"path": "head"}, "a Linear"),
        (partial(Stack, 3), {"every": 3}, "less than the number of layers, 3, found 3"),
        (partial(Stack, 3), {"every": 0}, "at least 1"),
        (partial(Stack, 3), {"scale": "max"}, "found 'max'"),
        (shared, {}, "one layer several times"),
        (lambda: changed(Stack(3), "model.layers.2.linear", torch.nn.Linear(10, 10, bias=False)), {}, "linear"),
        (lambda: changed(Stack(3), "model.layers.0.norm", torch.nn.Identity()), {}, "norm"),
        (lambda: changed(Stack(3), "model.layers.1.linear.weight.requires_grad", False), {}, "linear.weight"),
        (partial(llama, use_cache=True), {}, "use_cache: must be False"),
        (
            # A module without a config around one of Hugging Face, as in models of text and images.
            lambda: torch.nn.ModuleDict({"inner": llama(use_cache=True)}),
            {"path": "inner.model.layers"},
            "inner.config.use_cache: must be False",
        ),
        (lambda: unequal("activation", [RELU, RELU, SIGMOID]), {}, "activation"),
        (lambda: unequal("sizes", [(1, 2), (1, 2), (1, 3)]), {}, "sizes"),
        (lambda: unequal("window", WINDOWS), {}, "window (shape, dtype, digest of the values)"),
        # A model whose ``generate`` has a config of its own.
        (lambda: changed(llama(use_cache=True), "config.use_cache", False), {}, "generation_config.use_cache: must be"),
        (lambda: changed(llama(), "_tied_weights_keys", ["lm_head.weight"]), {}, "_tied_weights_keys: must be a dict"),
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
