"""Define the two ways to train with tensor parallelism: DeepSpeed's AutoTP, and an ``mpu`` as Megatron has it.

Ranks that follow one another share a model: with two ranks per model, ranks 0 and 1 do, and ranks 2 and 3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tests.tiny_llama import INNER, VOCABULARY, WIDTH, tiny_llama

MODEL_RANKS = 2
BY_NAME = {"layers.1.mlp.": "streamed", "self_attn.o_proj": "resident", "self_attn.": "cpu", "embed_tokens": "streamed"}


@dataclass(frozen=True, kw_only=True)
class SharedModel:
    """A model of several ranks. ``sharded`` is in the name of a parameter with shards; ``by_name`` are rules."""

    make: Callable[[], torch.nn.Module]
    mpu: Any
    config: dict[str, Any]
    sharded: str
    by_name: dict[str, str]

    @property
    def rules(self) -> list[dict[str, str]]:
        return [{"match": f"*{part}*", "states": states} for part, states in self.by_name.items()]

    def rule_for(self, name: str) -> str | None:
        return next((states for part, states in self.by_name.items() if part in name), None)


def model_rank() -> int:
    return dist.get_rank() % MODEL_RANKS


def data_rank() -> int:
    """Return which of the models this rank has a part of: each is trained on other data."""
    return dist.get_rank() // MODEL_RANKS


def sum_over(group: Any, partial: torch.Tensor) -> torch.Tensor:
    total = partial.detach().clone()
    dist.all_reduce(total, group=group)
    return total


class MegatronBlock(torch.nn.Module):
    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group = group
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.columns = torch.nn.Linear(WIDTH, INNER // MODEL_RANKS)
        self.rows = torch.nn.Linear(INNER // MODEL_RANKS, WIDTH, bias=False)
        for param in (*self.columns.parameters(), *self.rows.parameters()):
            # DeepSpeed adds the norms of such parameters over the ranks that share the model.
            param.model_parallel = True  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        # The gradient of what all ranks read is summed (Megatron's f), and the sum's is not (its g).
        normed.register_hook(lambda gradient: sum_over(self.group, gradient))
        partial = self.rows(torch.nn.functional.gelu(self.columns(normed)))
        return x + partial + (sum_over(self.group, partial) - partial.detach())


class MegatronNet(torch.nn.Module):
    def __init__(self, group: Any) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = torch.nn.ModuleList(MegatronBlock(group) for _ in range(3))
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return torch.nn.functional.cross_entropy(self.head(x[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


class MegatronGroups:
    def __init__(self) -> None:
        world_size = dist.get_world_size()
        models = [list(range(first, first + MODEL_RANKS)) for first in range(0, world_size, MODEL_RANKS)]
        shards = [list(range(first, world_size, MODEL_RANKS)) for first in range(MODEL_RANKS)]
        self._model = [dist.new_group(ranks) for ranks in models][data_rank()]
        self._shard = [dist.new_group(ranks) for ranks in shards][model_rank()]

    def get_model_parallel_group(self) -> Any:
        return self._model

    def get_model_parallel_rank(self) -> int:
        return model_rank()

    def get_model_parallel_world_size(self) -> int:
        return MODEL_RANKS

    def get_data_parallel_group(self) -> Any:
        return self._shard

    def get_data_parallel_rank(self) -> int:
        return data_rank()

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size() // MODEL_RANKS


def layouts() -> dict[str, SharedModel]:
    mpu = MegatronGroups()
    return {
        "AutoTP": SharedModel(
            make=tiny_llama,
            mpu=None,
            config={"tensor_parallel": {"autotp_size": MODEL_RANKS}},
            sharded="down_proj",
            by_name=BY_NAME,
        ),
        "mpu": SharedModel(
            make=lambda: MegatronNet(mpu.get_model_parallel_group()),
            mpu=mpu,
            config={},
            sharded="blocks.1.rows",
            by_name={"blocks.1.": "streamed", ".columns.": "cpu", "embed": "resident"},
        ),
    }


UNIVERSAL = {"checkpoint": {"load_universal": True}}
ONE_RANK = SharedModel(make=tiny_llama, mpu=None, config=UNIVERSAL, sharded="down_proj", by_name=BY_NAME)
"""The layout of AutoTP's model on a rank that has all of it, and loads universal checkpoints."""
