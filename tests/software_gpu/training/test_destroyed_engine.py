"""Test that a destroyed engine leaves no memory on the device but stock's, even while its optimizer is referenced."""

from __future__ import annotations

from tests.launch import run_ranks
from tests.software_gpu.training.destroyed_engine_ranks import BLOCKS

PROGRAM = "tests.software_gpu.training.destroyed_engine_ranks"

ROUNDING_BYTES = 64 * 1024


def test_a_destroyed_engine_leaves_no_memory_on_the_device_but_that_of_stock() -> None:
    (finished,) = run_ranks(1, ["-m", PROGRAM], timeout_s=200)
    assert finished.returncode == 0, finished.output[-4000:]
    stock, *answers = finished.answers()
    assert [found["block"] for found in answers] == list(BLOCKS)
    for found in answers:
        assert found["left_bytes"] <= stock["left_bytes"] + ROUNDING_BYTES, found["block"]
    assert answers[0]["reserved_bytes"] > 16 * ROUNDING_BYTES, "the states of resident units would be noticed"
