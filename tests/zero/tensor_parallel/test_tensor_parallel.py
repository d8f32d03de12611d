"""Check that training beside tensor parallelism has the bits of stock, and that uneven shards are refused."""

from __future__ import annotations

from pathlib import Path

import deepspeed
import pytest

from deep_opt_states.zero.start.unsupported import Unsupported
from tests.ranks import ranks
from tests.tiers import thorough
from tests.tiny_llama import tiny_llama
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
    train,
)
from tests.zero.tensor_parallel.layouts import SharedModel, layouts

STOCK, OURS = "DeepSpeedZeroOptimizer_Stage3", "DeepOptimizerStates_Stage3"


@pytest.mark.P1
@pytest.mark.parametrize("tier", ["quick", thorough("all")])
@ranks(2, thorough(4))
def test_training_beside_tensor_parallelism_has_the_bits_of_stock(tier: str) -> None:
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


STEPS_TO_SAVE = 2
SAVED_BY: dict[str, Block] = {"stock": None, "plugin": STRIDE_2}
WAYS: tuple[tuple[str, Block], ...] = (("plugin", None), ("stock", STREAMED), ("plugin", CPU))
"""The arm that saves each checkpoint, stock or the plugin, and the block that resumes it; None resumes with stock."""


def resumed(case: TensorParallelCase, layout: SharedModel, block: Block, folder: Path) -> Record:
    """Load the latest checkpoint in ``folder`` into a fresh engine, train, and return the record."""
    with closing_engine_of(case, layout, block) as engine:
        path, _ = engine.load_checkpoint(str(folder))
        assert path is not None
        assert set(recorded(engine).numbers["step"]) == {STEPS_TO_SAVE}
        return train(engine, case, layout, STEPS_TO_SAVE)


@pytest.mark.P1
@pytest.mark.P4
@pytest.mark.parametrize("name", ["mpu", thorough("AutoTP")])
@ranks(2)
def test_checkpoints_beside_tensor_parallelism_are_those_of_stock(name: str, tmp_path: Path) -> None:
    case, layout = TensorParallelCase(name, "bf16", "clipping", zero_init=False), layouts()[name]
    for saved_by, block in SAVED_BY.items():
        with closing_engine_of(case, layout, block) as engine:
            train(engine, case, layout, STEPS_TO_SAVE)
            engine.save_checkpoint(str(tmp_path / saved_by))
    stock = resumed(case, layout, None, tmp_path / "stock")
    assert len(stock.tensors) >= 30
    for saved_by, block in WAYS:
        assert_same_bits(stock, resumed(case, layout, block, tmp_path / saved_by))
