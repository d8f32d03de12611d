"""Define a small model of equal layers that can share their parameters, and the cases in which it is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad
from torch import nn
from torch.utils.checkpoint import checkpoint

from deep_opt_states.sharing import share_layers
from deep_opt_states.sharing.layers import Scale
from tests.zero.parity.case import Case
from tests.zero.parity.training import Block, Record, collect

WIDTH, TOKENS = 10, 13
BLOCK: Block = {"placement": "stride", "update_stride": 2, "unit_size": 60}
Checkpointing = Literal["reentrant", "non-reentrant"]


class StackLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Stack(nn.Module):
    def __init__(self, num_layers: int, *, checkpointing: Checkpointing | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(StackLayer() for _ in range(num_layers))
        self.head = nn.Linear(WIDTH, TOKENS)
        self._checkpointing = checkpointing

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        is_reentrant = self._checkpointing == "reentrant"
        for layer in self.model.layers:
            x = layer(x) if self._checkpointing is None else checkpoint(layer, x, use_reentrant=is_reentrant)
        logits = self.head(x).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(1, dims=1).flatten())


def tokens(rank: int, micro_batch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * micro_batch + rank)
    return torch.randint(TOKENS, (2, 7), generator=generator)


@dataclass(frozen=True, kw_only=True)
class SharingCase:
    layers: int
    hugging_face: bool = False
    every: int = 1
    scale: Scale = "mean"
    dtype: str = "fp32"
    checkpointing: Checkpointing | None = None
    zero_init: bool = False
    accumulation: int = 1

    def ds_config(self, block: Block) -> dict[str, Any]:
        zero, more = {"stage3_param_persistence_threshold": 20}, {"train_micro_batch_size_per_gpu": 2}
        sizes = {"accumulation": self.accumulation, "sub_group_size": 120, "zero": zero, "extra": more}
        case = Case(name="shared", blocks=(), dtype=self.dtype, clip=0.3, schedule=False, **sizes)
        return case.ds_config(block)

    def make_model(self, config: dict[str, Any] | None = None) -> torch.nn.Module:
        """Return the model with shared layers, partitioned from the start if ``zero_init`` and there is a config."""
        torch.manual_seed(7)
        with deepspeed.zero.Init(config_dict_or_path=config, enabled=self.zero_init and config is not None):
            if self.hugging_face:
                # Imported here: all ranks would import transformers, which is slow.
                from tests.tiny_llama import tiny_llama

                model = tiny_llama(vocab_size=TOKENS, hidden_size=8, num_hidden_layers=self.layers, use_cache=False)
            else:
                model = Stack(self.layers, checkpointing=self.checkpointing)
        inner = model.model if self.hugging_face else model
        share_layers(inner, "model.layers", every=self.every, scale=self.scale)
        return model


def make_engine(case: SharingCase, model: torch.nn.Module, block: Block, **changes: Any) -> Any:
    config = {**case.ds_config(block), **changes}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


def train(engine: Any, micro_batches: int) -> Record:
    losses = []
    for number in range(micro_batches):
        loss = engine(tokens(dist.get_rank(), number))
        engine.backward(loss)
        if number == micro_batches - 1:
            named = dict(engine.module.named_parameters())
            gradients = {f"gradient of {name}": safe_get_full_grad(param).clone() for name, param in named.items()}
        engine.step()
        losses.append(loss.item())
    record = Record(optimizer_class=type(engine.optimizer).__name__, numbers={"loss": losses})
    collect(engine.optimizer, record)
    record.tensors.update(gradients)
    return record
