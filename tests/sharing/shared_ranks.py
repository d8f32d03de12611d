"""Train models with shared layers in PyTorch, with stock DeepSpeed and with the plugin, and print the differences."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

from deep_opt_states.sharing import share_layers
from deep_opt_states.sharing.layers import Scale
from tests.launch import answer
from tests.sharing.stack_model import TOKENS, Checkpointing, Stack, tokens
from tests.tiny_llama import tiny_llama
from tests.zero.parity.training import Block, Record, collect, differences
from tests.zero.process_group import process_group

Tensors = dict[str, torch.Tensor]

STEPS = 3
BLOCK: Block = {"placement": "stride", "update_stride": 2, "unit_size": 60}


@dataclass(frozen=True, kw_only=True)
class SharingCase:
    """A model of ``layers`` layers, of which ``every`` have parameters: a ``Stack``, or a Llama of Hugging Face."""

    layers: int
    hugging_face: bool = False
    every: int = 1
    scale: Scale = "mean"
    dtype: str = "fp32"
    checkpointing: Checkpointing | None = None
    zero_init: bool = False
    accumulation: int = 1

    def ds_config(self, block: Block) -> dict[str, Any]:
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": 0.3,
            "steps_per_print": 10**9,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "cpu"},
                "sub_group_size": 120,
                "stage3_param_persistence_threshold": 20,
            },
        }
        if self.dtype == "bf16":
            config["bf16"] = {"enabled": True}
        if block is not None:
            config["deep_optimizer_states"] = block
        return config


CASES = (
    SharingCase(layers=4),
    SharingCase(layers=5, every=2, scale="sum", checkpointing="non-reentrant"),
    SharingCase(layers=4, checkpointing="reentrant"),
    SharingCase(layers=3, dtype="bf16", zero_init=True, accumulation=2),
    SharingCase(layers=4, every=2, hugging_face=True),
)


def make_model(case: SharingCase, config: dict[str, Any] | None = None) -> torch.nn.Module:
    torch.manual_seed(7)
    if case.hugging_face:
        llama = tiny_llama(
            vocab_size=TOKENS,
            hidden_size=8,
            intermediate_size=12,
            num_hidden_layers=case.layers,
            num_attention_heads=2,
            num_key_value_heads=1,
            use_cache=False,
        )
        share_layers(llama.model, "model.layers", every=case.every, scale=case.scale)
        return llama
    if case.zero_init and config is not None:
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = Stack(case.layers, checkpointing=case.checkpointing)
    else:
        model = Stack(case.layers, checkpointing=case.checkpointing)
    share_layers(model, "model.layers", every=case.every, scale=case.scale)
    return model


def gradients_of_torch(case: SharingCase, weights: Tensors) -> Tensors:
    """Return the mean gradients of the first window over all ranks, without DeepSpeed, for the initial ``weights``."""
    model = make_model(case)
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
    model = make_model(case, config)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    weights = {name: safe_get_full_fp32_param(param).clone() for name, param in model.named_parameters()}
    record, gradients, uses = Record(), {}, None
    losses = record.numbers["loss"] = []
    try:
        for step in range(STEPS):
            for position in range(case.accumulation):
                loss = engine(tokens(dist.get_rank(), step * case.accumulation + position))
                engine.backward(loss)
                if step == 0 and position == case.accumulation - 1:
                    gradients = {name: safe_get_full_grad(param).clone() for name, param in model.named_parameters()}
                engine.step()
                losses.append(loss.item())
        collect(engine.optimizer, record)
        if block is not None:
            uses = list(engine.optimizer._running.uses)
    finally:
        engine.destroy()
    return record, weights, gradients, uses


def compare(case: SharingCase) -> dict[str, Any]:
    # Stock fails under reentrant checkpointing, where a shared parameter's gradient arrives once per use. The reference
    # is non-reentrant: the gradients are added in the same order, and the division by four uses is exact.
    reference = replace(case, checkpointing="non-reentrant") if case.checkpointing == "reentrant" else case
    stock, weights, stock_gradients, _ = train(reference, None)
    ours, _, our_gradients, uses = train(case, BLOCK)
    expected = gradients_of_torch(case, weights)
    assert stock_gradients.keys() == our_gradients.keys() == expected.keys()
    distances = [float((stock_gradients[name] - tensor).norm() / tensor.norm()) for name, tensor in expected.items()]
    return {
        "unlike stock": differences(stock, ours)
        + [name for name in expected if not torch.equal(stock_gradients[name], our_gradients[name])],
        "tensors": len(stock.tensors),
        "params": sorted(expected),
        "uses": uses,
        "relative distance from torch": max(distances),
    }


if __name__ == "__main__":
    with process_group():
        for case in CASES:
            answer({**asdict(case), **compare(case)})
