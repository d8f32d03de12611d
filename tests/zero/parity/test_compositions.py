"""Check that libraries combined with ZeRO-3 give the bits of stock; ``test_refusals.py`` has those that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.zero.training_once import ProgramRanks, TrainingOnce, on_one_worker

WORLD_SIZE = {"transformers": 1, "peft": 1, "torch.compile": 1, "ulysses": 2}

RANKS = ProgramRanks("tests.zero.parity.composition_ranks", timeout_s=300)


def grouped(name: str, world_size: int) -> Any:
    """Return a test parameter such that one worker of pytest-xdist runs all models of a world size."""
    return pytest.param(name, world_size, id=name, marks=on_one_worker(RANKS.program, world_size))


@pytest.mark.promise("P1")
@pytest.mark.parametrize(("name", "world_size"), [grouped(*item) for item in WORLD_SIZE.items()])
def test_transformers_peft_compiled_and_ulysses_models_train_to_the_bits_of_stock(
    name: str, world_size: int, trained: TrainingOnce
) -> None:
    by_rank = trained.answers_by_name(world_size)
    assert set(by_rank[0]) == {key for key, size in WORLD_SIZE.items() if size == world_size}
    for by_name in by_rank:
        answer = by_name[name]
        assert answer["classes"] == ["DeepSpeedZeroOptimizer_Stage3", "DeepOptimizerStates_Stage3"]
        assert answer["sub_groups"] >= 3
        assert any(norm > 0.1 for norm in answer["norms"]), "clipping was never active"
        assert answer["differences"] == []
