"""The real engine on CUDA: every placement has stock's bits, with ``overlap_comm``."""

from __future__ import annotations

import pytest

from tests.gpu.engine import PLACEMENTS, trained
from tests.gpu.one_by_one import Answers
from tests.gpu.test_engine import check_bits


@pytest.fixture(scope="module")
def found() -> Answers:
    return trained([str(block) for block in PLACEMENTS.blocks])


@pytest.mark.parametrize("block", PLACEMENTS.blocks, ids=str)
def test_a_placement_has_the_bits_of_stock(block: dict[str, object], found: Answers) -> None:
    check_bits(found.of(str(block)))


def test_the_process_ends_well(found: Answers) -> None:
    assert found.ending == ""
