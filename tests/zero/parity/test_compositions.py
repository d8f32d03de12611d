"""Check that training with libraries, or other blocks of DeepSpeed's config, is bit-identical to stock."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.sequence.layer import DistributedAttention
from deepspeed.utils import groups

from tests.ranks import on_ranks, ranks
from tests.tiers import thorough
from tests.tiny_llama import VOCABULARY, WIDTH, LossOfCausalModel, tiny_llama
from tests.zero.parity.case import STRIDE_2, Case
from tests.zero.parity.training import Block, Record, assert_same_bits, closing_engine, shared_folder, train
from tests.zero.test_monitoring import Wandb

STOCK, OURS = "DeepSpeedZeroOptimizer_Stage3", "DeepOptimizerStates_Stage3"


def lora() -> torch.nn.Module:
    # Imported here, because most ranks do not need it, and importing it takes longer than training.
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=8, target_modules="all-linear", lora_dropout=0.0)
    return LossOfCausalModel(get_peft_model(tiny_llama().model, config))


class Ulysses(torch.nn.Module):
    """Attention over a sequence that is split over the ranks. ``tokens`` are this rank's part."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        qkv = self.qkv(x).view(*tokens.shape, 3, 4, WIDTH // 4).unbind(2)
        attention = DistributedAttention(attend, groups._get_sequence_parallel_group(), scatter_idx=2, gather_idx=1)
        x = attention(*(part.contiguous() for part in qkv), 0).reshape(x.shape)
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), tokens.flatten())


def attend(*qkv: torch.Tensor) -> torch.Tensor:
    heads_first = (part.transpose(1, 2) for part in qkv)
    return torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2).contiguous()


def train_model(make_model: Callable[[], torch.nn.Module], block: Block) -> Record:
    torch.manual_seed(0)
    model, size = make_model(), dist.get_world_size()
    extra = {"sequence_parallel_size": size, "data_parallel_size": 1} if make_model is Ulysses else {}
    case = Case(name="library", blocks=(), steps=5, clip=0.1, world_size=size, sub_group_size=2000, extra=extra)
    trainable = [param for param in model.parameters() if param.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trainable, config=case.ds_config(block))

    def tokens(_: Case, step: int, micro_batch: int) -> tuple[torch.Tensor]:
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        return (torch.randint(0, VOCABULARY, (2, 16), generator=generator),)

    record = train(engine, case, Path(), tokens)
    engine.destroy()
    return record


@pytest.mark.P1
@pytest.mark.parametrize(("make_model", "world_size"), [(lora, 1), (Ulysses, 2)])
def test_models_of_libraries_train_bit_identically_to_stock(
    make_model: Callable[[], torch.nn.Module], world_size: int
) -> None:
    on_ranks(world_size, compare_models, make_model)


def compare_models(make_model: Callable[[], torch.nn.Module]) -> None:
    stock, ours = (train_model(make_model, block) for block in (None, STRIDE_2))
    assert [stock.optimizer_class, ours.optimizer_class] == [STOCK, OURS]
    assert len(ours.numbers["step"]) >= 3
    assert any(norm > 0.1 for norm in stock.numbers["norm"]), "clipping was never active"
    assert_same_bits(stock, ours)


@pytest.mark.P1
@pytest.mark.parametrize("backend", ["eager", thorough("inductor")])
@ranks(1)
def test_a_compiled_model_trains_bit_identically_to_stock(backend: str) -> None:
    case = Case(name="compiled", blocks=(), clip=0.5, steps=4, widths=(19, 53, 23), sub_group_size=500)
    records = []
    for block in (None, STRIDE_2):
        with closing_engine(case, block) as engine:
            engine.compile(backend=backend)
            assert engine.is_compiled
            records.append(train(engine, case, Path()))
    assert [record.optimizer_class for record in records] == [STOCK, OURS]
    assert any(norm > 0.5 for norm in records[0].numbers["norm"]), "clipping was never active"
    assert_same_bits(*records)


OTHER_BLOCKS: dict[str, dict[str, Any]] = {
    "all that changes no number": {
        "comms_logger": {"enabled": True},
        "fp16": {"enabled": True, "initial_scale_power": 10},
        "checkpoint": {"tag_validation": "Fail", "use_node_local_storage": True},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "aio": {"block_size": 2**20, "queue_depth": 8, "intra_op_parallelism": 1, "overlap_events": True},
        "activation_checkpointing": {"partition_activations": True, "profile": True},
        "disable_python_gc": True,
        "disable_allgather": True,
    },
    "all that watches": {
        "comms_logger": {"enabled": True, "verbose": True, "debug": True},
        "flops_profiler": {"enabled": True, "profile_step": 2, "detailed": True, "output_file": "flops.txt"},
        "wall_clock_breakdown": True,
        "memory_breakdown": True,
        "dump_state": True,
        "tensorboard": {"enabled": True, "output_path": "tensorboard"},
        "csv_monitor": {"enabled": True, "output_path": "csv"},
        "wandb": {"enabled": True},
    },
}
"""Parts of a config that watch a training run, or that change it elsewhere than in the update."""


def train_with(case: Case, block: Block, folder: Path) -> Record:
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    with (
        mock.patch.dict(sys.modules, wandb=Wandb()),
        closing_engine(case, block) as engine,
        shared_folder() as checkpoints,
    ):
        return train(engine, case, checkpoints)


@pytest.mark.P1
@pytest.mark.parametrize("name", OTHER_BLOCKS)
@ranks(2)
def test_training_with_another_block_is_bit_identical_to_stock(name: str, tmp_path: Path) -> None:
    block = OTHER_BLOCKS[name]
    in_fp16 = "fp16" in block
    case = Case(
        name=name,
        blocks=(),
        world_size=2,
        dtype="fp16" if in_fp16 else "bf16",
        steps=4,
        clip=0.5,
        accumulation=2,
        poisoned={1: 1e6} if in_fp16 else {},
        reload=(2, 3) if "checkpoint" in block else None,
        extra=block,
    )
    stock, ours = (train_with(case, ours, tmp_path / str(ours is None)) for ours in (None, STRIDE_2))
    assert [stock.optimizer_class, ours.optimizer_class] == [STOCK, OURS]
    assert len(ours.numbers["step"]) >= 4
    assert_same_bits(stock, ours)
    assert (ours.deferred > 0) == ("flops_profiler" not in block)
