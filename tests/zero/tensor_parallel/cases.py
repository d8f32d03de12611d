"""List the cases of training with tensor parallelism, and train them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from deep_opt_states.zero.internals.compat import partitions_by_name
from perf_model.training_run.job import shard_numel
from tests.tiny_llama import VOCABULARY, tiny_llama
from tests.zero.on_accelerator import on_accelerator
from tests.zero.parity import training
from tests.zero.parity.case import Case
from tests.zero.parity.training import Block, Record, placements_by_name
from tests.zero.tensor_parallel.layouts import MODEL_RANKS, SharedModel, data_rank, model_rank

BY_NAME = "rules by name"
PLACEMENTS: dict[str, dict[str, Any]] = {"streamed": {"placement": "streamed", "unit_size": 700}, "planned": {}}
ARMS = (*PLACEMENTS, BY_NAME)

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipping": {"clip": 0.1},
    "accumulation 2": {"accumulation": 2, "clip": 0.1},
}


@dataclass(frozen=True)
class TensorParallelCase:
    """A training run with stock and with each of ``ARMS``. In fp16, one step overflows on one rank of a model."""

    layout: str
    dtype: str
    setting: str
    zero_init: bool

    def parity_case(self, layout: SharedModel, steps: int) -> Case:
        return Case(
            name=f"{self.layout}, {self.dtype}, {self.setting}",
            blocks=(),
            # The ranks among which DeepSpeed divides the states.
            world_size=max(1, dist.get_world_size() // MODEL_RANKS),
            dtype=self.dtype,
            steps=steps,
            sub_group_size=2000,
            zero={"stage3_param_persistence_threshold": 100},
            extra=layout.config,
            **SETTINGS[self.setting],
        )


QUICK = (
    TensorParallelCase("AutoTP", "fp16", "accumulation 2", zero_init=True),
    TensorParallelCase("mpu", "bf16", "clipping", zero_init=True),
)

CASES = (
    *QUICK,
    TensorParallelCase("AutoTP", "bf16", "clipping", zero_init=False),
    TensorParallelCase("mpu", "fp16", "plain", zero_init=False),
    TensorParallelCase("mpu", "fp32", "accumulation 2", zero_init=False),
)

STEPS = 4
OVERFLOW_STEP = 2


@contextmanager
def closing_engine_of(case: TensorParallelCase, layout: SharedModel, block: Block) -> Iterator[Any]:
    config = case.parity_case(layout, STEPS).ds_config(block)
    torch.manual_seed(3)
    init = deepspeed.zero.Init(config_dict_or_path=config, mpu=layout.mpu) if case.zero_init else nullcontext()
    with init:
        model = layout.make()
    if case.zero_init:
        # Transformers does not initialize the parameters in that context.
        with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=None):
            generator = torch.Generator().manual_seed(5)
            for param in model.parameters():
                param.data.copy_(0.1 * torch.randn(param.shape, generator=generator))
    options = {} if layout.mpu is None else {"mpu": layout.mpu, "dist_init_required": False}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config, **options)
    try:
        yield engine
    finally:
        engine.destroy()


def tokens_of(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + data_rank())
    return on_accelerator(torch.randint(0, VOCABULARY, (2, 12), generator=generator))


def train(engine: Any, case: TensorParallelCase, layout: SharedModel, steps: int = STEPS) -> Record:
    overflowing = False

    def inputs(_: Case, step: int, micro_batch: int) -> tuple[torch.Tensor]:
        nonlocal overflowing
        overflowing = step == OVERFLOW_STEP
        return (tokens_of(micro_batch),)

    if case.dtype == "fp16" and model_rank() == MODEL_RANKS - 1:
        (param,) = (
            param
            for name, param in engine.module.named_parameters()
            if layout.sharded in name and name.endswith("weight") and ("layers" not in name or "layers.1" in name)
        )
        param.register_hook(lambda grad: grad * float("inf") if overflowing else None)
    return training.train(engine, case.parity_case(layout, steps), Path(), inputs)


def run(case: TensorParallelCase, layout: SharedModel, block: Block, steps: int = STEPS) -> Record:
    with closing_engine_of(case, layout, block) as engine:
        record = train(engine, case, layout, steps)
        if block is not None and block.get("placement") == layout.rules:
            check_placements(engine, layout)
        if block is not None:
            record.placements = {placement.value for placement in placements_by_name(engine.optimizer).values()}
        return record


def planned_numels() -> tuple[float, int]:
    """Return the elements per rank that ``plan --tensor-parallel`` counts, and the elements of norms, counted whole."""
    with torch.device("meta"):
        numels = {name: param.numel() for name, param in tiny_llama().named_parameters()}
    shards = sum(shard_numel(name, numel, MODEL_RANKS) for name, numel in numels.items())
    norms = sum(numel for name, numel in numels.items() if "norm" in name)
    return shards / (dist.get_world_size() // MODEL_RANKS), norms


def block_of(arm: str, layout: SharedModel) -> dict[str, Any]:
    return {"placement": layout.rules, "unit_size": 700} if arm == BY_NAME else PLACEMENTS[arm]


def check_placements(engine: Any, layout: SharedModel) -> None:
    by_name = placements_by_name(engine.optimizer)
    partitions = [partition for group in partitions_by_name(engine.optimizer) for partition in group]
    # The CPU updates these in any case.
    persistent = {partition.name for partition in partitions if partition.is_persistent}
    rules = {name: layout.rule_for(name) for name in by_name}
    assert {*rules.values()} == {None, *layout.by_name.values()}
    for name, found in by_name.items():
        assert name in persistent or rules[name] in (None, found.value), name
