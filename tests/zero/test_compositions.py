"""What people combine with ZeRO-3 gives stock's bits, too; what does not is in ``test_refusals.py``."""

from __future__ import annotations

from typing import Any

import pytest

from tests.launch import run_ranks

WORLD_SIZE = {"transformers": 1, "peft": 1, "torch.compile": 1, "ulysses": 2}


# One worker of pytest-xdist makes the fixture, once.
pytestmark = pytest.mark.xdist_group("compositions")


@pytest.fixture(scope="module")
def answers() -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for world_size in set(WORLD_SIZE.values()):
        for finished in run_ranks(world_size, ["-m", "tests.zero.scripts.compositions"], timeout_s=300):
            assert finished.returncode == 0, finished.output[-4000:]
            for answer in finished.answers():
                found.setdefault(answer["name"], []).append(answer)
    return found


@pytest.mark.parametrize("name", WORLD_SIZE)
def test_same_bits_as_stock(name: str, answers: dict[str, list[dict[str, Any]]]) -> None:
    assert len(answers[name]) == WORLD_SIZE[name]
    for answer in answers[name]:
        assert answer["classes"] == ["DeepSpeedZeroOptimizer_Stage3", "DeepOptimizerStates_Stage3"]
        assert answer["sub_groups"] >= 3
        assert any(norm > 0.1 for norm in answer["norms"]), "clipping was never active"
        assert answer["differences"] == []
