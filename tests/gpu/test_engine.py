"""The real engine on CUDA: every placement has stock's bits, with ``overlap_comm``; and so has every repetition.

A gradient crosses PCIe once, or not at all, and what crosses it lies in page-locked memory.
"""

from __future__ import annotations

import pytest

from tests.gpu.engine import COMPARED, LONG, PAGE_LOCKED, TRAFFIC
from tests.launch import run_ranks
from tests.zero.test_gradient_traffic import CASES as TRAFFIC_CASES
from tests.zero.test_gradient_traffic import check_traffic

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
def found() -> dict[str, dict]:
    """Of all but the long runs: a process takes seconds to start."""
    return trained([*(case.name for case in COMPARED), TRAFFIC, PAGE_LOCKED], timeout_s=90)


@pytest.mark.parametrize("case", COMPARED, ids=lambda case: case.name)
def test_all_placements_have_the_bits_of_stock(case, found: dict[str, dict]) -> None:
    its = found[case.name]
    assert its["stock class"] == STOCK
    assert len(its["numbers"]["step"]) >= 4, "a case is about several sub-groups"
    for arm, differ in its["differences"].items():
        assert its["classes"][arm] == (STOCK if arm.endswith("to stock") else OURS)
        assert differ == [], arm


def test_gradient_bytes_by_direction(found: dict[str, dict]) -> None:
    for case, its in zip(TRAFFIC_CASES, found[TRAFFIC]["cases"], strict=True):
        # A GPU has room for sums of so few parameters.
        check_traffic(*case, its, sums_stay=True)


def test_the_states_in_host_memory_are_page_locked_until_destroy(found: dict[str, dict]) -> None:
    for its in found[PAGE_LOCKED]["engines"]:
        assert len(its["alive"]) > 10, "masters and moments of several sub-groups"
        assert all(its["alive"])
        assert not any(its["destroyed"])


def test_200_steps_again_and_again_have_the_same_bits() -> None:
    found = trained([LONG.name], timeout_s=60)[LONG.name]
    assert len(found["numbers"]["step"]) == len(LONG.blocks[0]["placement"])
    assert len(set(found["numbers"]["loss"])) > 100, "it trains"
    for what, differ in found["differences"].items():
        assert differ == [], what
