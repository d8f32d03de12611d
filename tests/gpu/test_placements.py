"""Test the real engine on CUDA with ``overlap_comm``: every placement has stock's bits."""

from __future__ import annotations

import pytest

from tests.gpu.engine import PLACEMENTS, trained
from tests.gpu.one_by_one import Answers
from tests.gpu.test_engine import check_bits


@pytest.fixture(scope="module")
def found() -> Answers:
    return trained([str(block) for block in PLACEMENTS.blocks])


@pytest.mark.parametrize("block", PLACEMENTS.blocks, ids=str)
def test_every_placement_has_the_bits_of_stock(block: dict[str, object], found: Answers) -> None:
    check_bits(found.result(str(block)))


def test_the_process_of_the_placements_exits_without_an_error(found: Answers) -> None:
    assert found.ending == ""
