"""The real engine on CUDA: every placement has stock's bits, with ``overlap_comm``; and so has every repetition."""

from __future__ import annotations

import pytest

from tests.gpu.engine import COMPARED, LONG
from tests.launch import run_ranks

OURS, STOCK = "DeepOptimizerStates_Stage3", "DeepSpeedZeroOptimizer_Stage3"


def trained(names: list[str], timeout_s: float) -> dict[str, dict]:
    """cuBLAS repeats its bits only with a workspace of its own."""
    (finished,) = run_ranks(
        1,
        ["-m", "tests.gpu.engine", *names],
        timeout_s=timeout_s,
        DS_ACCELERATOR="cuda",
        CUBLAS_WORKSPACE_CONFIG=":4096:8",
        OMP_NUM_THREADS="4",
    )
    assert finished.returncode == 0, finished.output[-5000:]
    return {found["name"]: found for found in finished.answers()}


@pytest.fixture(scope="module")
def compared() -> dict[str, dict]:
    return trained([case.name for case in COMPARED], timeout_s=90)


@pytest.mark.parametrize("case", COMPARED, ids=lambda case: case.name)
def test_all_placements_have_the_bits_of_stock(case, compared: dict[str, dict]) -> None:
    found = compared[case.name]
    assert found["stock class"] == STOCK
    assert len(found["numbers"]["step"]) >= 4, "a case is about several sub-groups"
    for arm, differ in found["differences"].items():
        assert found["classes"][arm] == (STOCK if arm.endswith("to stock") else OURS)
        assert differ == [], arm


def test_200_steps_again_and_again_have_the_same_bits() -> None:
    found = trained([LONG.name], timeout_s=60)[LONG.name]
    assert len(found["numbers"]["step"]) == len(LONG.blocks[0]["placement"])
    assert len(set(found["numbers"]["loss"])) > 100, "it trains"
    for what, differ in found["differences"].items():
        assert differ == [], what
