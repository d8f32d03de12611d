"""The real engine on CUDA: every kind of training has stock's bits, with ``overlap_comm``.

A gradient crosses PCIe once, or not at all, and what crosses it lies in page-locked memory.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu.engine import COMPARED, PAGE_LOCKED, TRAFFIC, WIDE, trained
from tests.gpu.figures import figure
from tests.gpu.one_by_one import Answers
from tests.zero.parity.case import Case
from tests.zero.test_gradient_traffic import CASES as TRAFFIC_CASES
from tests.zero.test_gradient_traffic import check_traffic

OURS, STOCK = "DeepOptimizerStates_Stage3", "DeepSpeedZeroOptimizer_Stage3"

ROUNDING_BYTES = 2 * 2**20
"""PyTorch's allocator hands out blocks of up to so much more than was asked for."""


@pytest.fixture(scope="module")
def found() -> Answers:
    """Of all cases: a process takes seconds to start."""
    return trained([TRAFFIC, PAGE_LOCKED, WIDE.name, *(case.name for case in COMPARED)])


def check_bits(answer: dict[str, Any]) -> None:
    assert answer["stock class"] == STOCK
    assert len(answer["numbers"]["step"]) >= 4, "a case is about several sub-groups"
    for arm, differ in answer["differences"].items():
        assert answer["classes"][arm] == (STOCK if arm.endswith("to stock") else OURS)
        assert differ == [], arm


@pytest.mark.parametrize("case", COMPARED, ids=lambda case: case.name)
def test_every_kind_of_training_has_the_bits_of_stock(case: Case, found: Answers) -> None:
    check_bits(found.of(case.name))


def test_gradient_bytes_by_direction(found: Answers) -> None:
    for (block, accumulation), moved in zip(TRAFFIC_CASES, found.of(TRAFFIC)["cases"], strict=True):
        # A GPU has room for sums of so few parameters.
        check_traffic(block, accumulation, moved, sums_stay=True)


def test_the_states_in_host_memory_are_page_locked_until_destroy(found: Answers) -> None:
    for engine in found.of(PAGE_LOCKED)["engines"]:
        assert len(engine["alive"]) > 10, "masters and moments of several sub-groups"
        assert all(engine["alive"])
        assert not any(engine["destroyed"])


def test_the_peak_of_gpu_memory_is_stock_s_and_what_is_reserved(found: Answers) -> None:
    """Gradients on their way down take no memory that was not reserved at the start."""
    arms = found.of(WIDE.name)["arms"]
    stock_bytes = arms.pop("stock")["peak_bytes"]
    figure("peak GPU memory, stock", stock_bytes / 1e6, "MB")
    for block, memory in arms.items():
        figure(f"peak GPU memory, {block}", memory["peak_bytes"] / 1e6, "MB")
        figure(f"of it reserved at the start, {block}", memory["reserved_bytes"] / 1e6, "MB")
    for block, memory in arms.items():
        assert memory["peak_bytes"] <= stock_bytes + memory["reserved_bytes"] + ROUNDING_BYTES, block


def test_the_process_ends_well(found: Answers) -> None:
    assert found.ending == ""
