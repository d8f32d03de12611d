"""Test the real engine on CUDA with ``overlap_comm``: every kind of training has stock's bits.

A gradient crosses PCIe at most once, and all copies use page-locked memory.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu.engine import COMPARED, PAGE_LOCKED, TRAFFIC, WIDE, trained
from tests.gpu.figures import figure
from tests.gpu.one_by_one import Answers
from tests.zero.gradients.test_gradient_traffic import CASES as TRAFFIC_CASES
from tests.zero.gradients.test_gradient_traffic import check_traffic
from tests.zero.parity.case import Case

PLUGIN, STOCK = "DeepOptimizerStates_Stage3", "DeepSpeedZeroOptimizer_Stage3"

ROUNDING_BYTES = 2 * 2**20
"""PyTorch's allocator returns blocks that are up to this much larger than requested."""


@pytest.fixture(scope="module")
def found() -> Answers:
    """Return the answers of all cases, which share a process since starting one takes seconds."""
    return trained([TRAFFIC, PAGE_LOCKED, WIDE.name, *(case.name for case in COMPARED)])


def check_bits(answer: dict[str, Any]) -> None:
    """Check that the case trained several sub-groups, and that no variant differs from stock."""
    assert answer["stock class"] == STOCK
    assert len(answer["numbers"]["step"]) >= 4, "a case has several sub-groups"
    for variant, differ in answer["differences"].items():
        assert answer["classes"][variant] == (STOCK if variant.endswith("to stock") else PLUGIN)
        assert differ == [], variant


@pytest.mark.parametrize("case", COMPARED, ids=lambda case: case.name)
def test_every_kind_of_training_has_the_bits_of_stock(case: Case, found: Answers) -> None:
    check_bits(found.result(case.name))


def test_each_gradient_moves_the_expected_bytes_in_each_direction(found: Answers) -> None:
    for (block, accumulation), moved in zip(TRAFFIC_CASES, found.result(TRAFFIC)["cases"], strict=True):
        # A GPU has enough memory for the accumulators of so few parameters.
        check_traffic(block, accumulation, moved, sums_stay=True)


def test_the_states_in_host_memory_are_page_locked_until_destroy(found: Answers) -> None:
    for engine in found.result(PAGE_LOCKED)["engines"]:
        assert len(engine["alive"]) > 10, "masters and moments of several sub-groups"
        assert all(engine["alive"])
        assert not any(engine["destroyed"])


def test_the_peak_of_gpu_memory_is_at_most_that_of_stock_plus_the_reserved_memory(found: Answers) -> None:
    """Check that gradients on their way to the host use only memory that was reserved at the start."""
    variants = found.result(WIDE.name)["variants"]
    stock_bytes = variants.pop("stock")["peak_bytes"]
    figure("peak GPU memory, stock", stock_bytes / 1e6, "MB")
    for block, memory in variants.items():
        figure(f"peak GPU memory, {block}", memory["peak_bytes"] / 1e6, "MB")
        figure(f"GPU memory reserved at the start, {block}", memory["reserved_bytes"] / 1e6, "MB")
    for block, memory in variants.items():
        assert memory["peak_bytes"] <= stock_bytes + memory["reserved_bytes"] + ROUNDING_BYTES, block


def test_the_process_of_the_engine_cases_exits_without_an_error(found: Answers) -> None:
    assert found.ending == ""
