"""Check that training with tensor parallelism is bit-identical to stock, and that uneven shards are refused."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import pytest

from deep_opt_states.config import Unsupported
from tests.ranks import on_ranks, ranks
from tests.tiers import thorough
from tests.tiny_llama import tiny_llama
from tests.zero.checkpoints.test_checkpoints import convert_to_universal
from tests.zero.failures.test_failures import failing_update, must_raise_everywhere, must_refuse
from tests.zero.parity.case import CPU, STREAMED, STRIDE_2, Case
from tests.zero.parity.training import Block, Record, assert_same_bits, recorded
from tests.zero.tensor_parallel.cases import (
    ARMS,
    CASES,
    QUICK,
    TensorParallelCase,
    block_of,
    closing_engine_of,
    planned_numels,
    run,
    tokens_of,
    train,
)
from tests.zero.tensor_parallel.layouts import ONE_RANK, SharedModel, layouts

STOCK, OURS = "DeepSpeedZeroOptimizer_Stage3", "DeepOptimizerStates_Stage3"


@pytest.mark.P1
@pytest.mark.parametrize("tier", ["quick", thorough("all")])
@ranks(2, thorough(4))
def test_training_with_tensor_parallelism_is_bit_identical_to_stock(tier: str) -> None:
    by_name = layouts()
    for case in QUICK if tier == "quick" else CASES:
        train_in_each_placement(case, by_name[case.layout])


def train_in_each_placement(case: TensorParallelCase, layout: SharedModel) -> None:
    stock = run(case, layout, None)
    for arm in ARMS:
        ours = run(case, layout, block_of(arm, layout))
        assert [stock.optimizer_class, ours.optimizer_class] == [STOCK, OURS]
        assert_same_bits(stock, ours)
    assert len(stock.numbers["step"]) >= 3, "a case must have several sub-groups"
    masters = [tensor.numel() for name, tensor in stock.tensors.items() if name.startswith("master")]
    assert len(masters) >= 14
    if case.layout == "AutoTP" and case.zero_init:
        planned, norms = planned_numels()
        assert 0 <= planned - sum(masters) <= norms, "`plan --tensor-parallel` plans for another model"
    if case.setting != "plain":
        assert any(0.1 < norm < float("inf") for norm in stock.numbers["norm"]), "clipping was never active"
    assert stock.numbers["skipped"][-1] == (case.dtype == "fp16"), "the overflow on one rank skips one step on all"


@pytest.mark.P6
@ranks(2)
def test_shards_of_different_sizes_are_refused_with_the_name_of_autotp() -> None:
    model = tiny_llama(num_attention_heads=6, num_key_value_heads=3, hidden_size=48)
    case = Case(name="uneven", blocks=(), schedule=False, extra={"tensor_parallel": {"autotp_size": 2}})
    with pytest.raises(Unsupported) as caught:
        deepspeed.initialize(model=model, model_parameters=model.parameters(), config=case.ds_config({}))
    refused = str(caught.value)
    assert refused.startswith("tensor_parallel.autotp_size, or the model-parallel size of the mpu: must")
    assert "elements of" in refused
    assert "on rank 0 and" in refused
    assert "Choose a size that divides the attention heads" in refused


def step(engine: Any) -> None:
    engine.backward(engine(tokens_of(99)))
    engine.step()


@pytest.mark.P6
@pytest.mark.thorough
@pytest.mark.parametrize("name", ["AutoTP", "mpu"])
@ranks(4, timeout_s=600)
def test_a_failed_update_on_one_rank_stops_all_ranks_that_share_models(name: str, tmp_path: Path) -> None:
    """Let rank 1 fail in an update in flight, which shares a model with rank 0, and a shard with rank 3."""
    case, layout = case_of(name), layouts()[name]
    with closing_engine_of(case, layout, STRIDE_2) as engine:
        train(engine, case, layout, 2)
        engine.save_checkpoint(str(tmp_path))
        step(engine)
        with failing_update(engine, "cpu"):
            step(engine)
            must_raise_everywhere(lambda: step(engine))
        must_refuse(step, engine)
        must_refuse(engine.save_checkpoint, str(tmp_path / "inconsistent"))
        engine.load_checkpoint(str(tmp_path))
        ours = train(engine, case, layout, 2)
    with closing_engine_of(case, layout, None) as engine:
        engine.load_checkpoint(str(tmp_path))
        assert_same_bits(train(engine, case, layout, 2), ours)


STEPS_TO_SAVE = 2
SAVED_BY: dict[str, Block] = {"stock": None, "plugin": STRIDE_2}
WAYS: tuple[tuple[str, Block], ...] = (("plugin", None), ("stock", STREAMED), ("plugin", CPU))
"""The arm that saves each checkpoint, stock or the plugin, and the block that resumes it; None resumes with stock."""


def case_of(name: str) -> TensorParallelCase:
    return TensorParallelCase(name, "bf16", "clipping", zero_init=False)


def resumed(case: TensorParallelCase, layout: SharedModel, block: Block, folder: Path) -> Record:
    with closing_engine_of(case, layout, block) as engine:
        path, _ = engine.load_checkpoint(str(folder))
        assert path is not None
        assert set(recorded(engine).numbers["step"]) == {STEPS_TO_SAVE}
        return train(engine, case, layout, STEPS_TO_SAVE)


@pytest.mark.P1
@pytest.mark.P4
@pytest.mark.parametrize("name", ["mpu", thorough("AutoTP")])
def test_checkpoints_with_tensor_parallelism_equal_stocks(name: str, tmp_path: Path) -> None:
    """Load them with another placement, and universal ones of AutoTP's ranks on one rank, which has the whole model."""
    on_ranks(2, save_and_resume, tmp_path, name)
    if name == "AutoTP":
        for saved_by in SAVED_BY:
            on_ranks(1, convert_to_universal, tmp_path / saved_by, f"global_step{STEPS_TO_SAVE}", group=nullcontext)
        on_ranks(1, partial(save_and_resume, tmp_path, name, universal=True))


def save_and_resume(folder: Path, name: str, *, universal: bool = False) -> None:
    case, layout = case_of(name), ONE_RANK if universal else layouts()[name]
    for saved_by, block in () if universal else SAVED_BY.items():
        with closing_engine_of(case, layout, block) as engine:
            train(engine, case, layout, STEPS_TO_SAVE)
            engine.save_checkpoint(str(folder / saved_by))
    stock = resumed(case, layout, None, folder / "stock")
    assert len(stock.tensors) >= 30
    for saved_by, block in WAYS:
        assert_same_bits(stock, resumed(case, layout, block, folder / saved_by))
