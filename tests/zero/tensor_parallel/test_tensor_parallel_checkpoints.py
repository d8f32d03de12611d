"""Check that checkpoints beside tensor parallelism are exchanged with stock, and that one rank loads them."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.ranks import on_ranks
from tests.tiers import thorough
from tests.zero.checkpoints.test_checkpoints import convert_to_universal
from tests.zero.parity.case import CPU, STRIDE_2
from tests.zero.parity.training import Block, Record, assert_same_bits, collect
from tests.zero.tensor_parallel.cases import TensorParallelCase, closing_engine_of, train
from tests.zero.tensor_parallel.layouts import SharedModel, layouts, one_rank_per_model

STEPS = 2
ANOTHER_PLACEMENT = {"placement": [{"match": "*", "states": "streamed"}], "unit_size": 700}
SAVED_BY: dict[str, Block] = {"stock": None, "plugin": STRIDE_2}


def case_of(name: str) -> TensorParallelCase:
    """Return the case that the jobs train with the layout ``name``."""
    return TensorParallelCase(name, "bf16", "clipping", zero_init=False)


def resumed(case: TensorParallelCase, layout: SharedModel, block: Block, folder: Path) -> Record:
    """Load the latest checkpoint in ``folder`` into a fresh engine, train, and return the record."""
    with closing_engine_of(case, layout, block) as engine:
        path, _ = engine.load_checkpoint(str(folder))
        assert path is not None
        loaded = Record()
        collect(engine.optimizer, loaded)
        assert set(loaded.numbers["step"]) == {STEPS}
        return train(engine, case, layout, STEPS)


WAYS: tuple[tuple[str, Block], ...] = (("plugin", None), ("stock", ANOTHER_PLACEMENT), ("plugin", CPU))
"""The arm that saves each checkpoint, stock or the plugin, and the block that resumes it; None resumes with stock."""


@pytest.mark.promise("P1", "P4")
@pytest.mark.parametrize("name", ["mpu", thorough("AutoTP")])
@pytest.mark.parametrize("world_size", [2, thorough(4)])
def test_checkpoints_beside_tensor_parallelism_are_those_of_stock(name: str, world_size: int, tmp_path: Path) -> None:
    """Check it with another placement, and with one rank that loads universal checkpoints of AutoTP's ranks."""
    on_ranks(world_size, save_and_resume, tmp_path, name)
    if name == "AutoTP":
        on_ranks(1, convert, tmp_path, group=nullcontext)
        on_ranks(1, load_on_one_rank, tmp_path)


def save_and_resume(folder: Path, name: str) -> None:
    case, layout = case_of(name), layouts()[name]
    for saved_by, block in SAVED_BY.items():
        with closing_engine_of(case, layout, block) as engine:
            train(engine, case, layout, STEPS)
            engine.save_checkpoint(str(folder / saved_by))
    resume_in_each_way(case, layout, folder)


def convert(folder: Path) -> None:
    """Convert the checkpoints of stock and of the plugin to universal checkpoints."""
    for saved_by in SAVED_BY:
        convert_to_universal(folder / saved_by, f"global_step{STEPS}")


def load_on_one_rank(folder: Path) -> None:
    """Load universal checkpoints of ranks that shared a model on one rank, which has the whole model."""
    resume_in_each_way(case_of("AutoTP"), one_rank_per_model({"checkpoint": {"load_universal": True}}), folder)


def resume_in_each_way(case: TensorParallelCase, layout: SharedModel, folder: Path) -> None:
    stock = resumed(case, layout, None, folder / "stock")
    assert len(stock.tensors) >= 30
    for saved_by, block in WAYS:
        assert_same_bits(stock, resumed(case, layout, block, folder / saved_by))
