"""Test that a destroyed engine, and one whose parameters are offloaded, leave only stock's memory on the device."""

from __future__ import annotations

from tests.software_gpu.training.destroyed_engine_ranks import BLOCKS
from tests.zero.training_once import ProgramRanks, TrainingOnce, on_one_worker

PROGRAM = "tests.software_gpu.training.destroyed_engine_ranks"

ROUNDING_BYTES = 64 * 1024
RANKS = ProgramRanks(PROGRAM, timeout_s=200)
pytestmark = on_one_worker(PROGRAM)


def test_a_destroyed_engine_leaves_no_memory_on_the_device_but_that_of_stock(trained: TrainingOnce) -> None:
    stock, *answers = trained.answers(1)[0]
    assert [found["block"] for found in answers] == list(BLOCKS)
    for found in answers:
        assert found["left_bytes"] <= stock["left_bytes"] + ROUNDING_BYTES, found["block"]
    assert answers[0]["reserved_bytes"] > 16 * ROUNDING_BYTES, "the states of resident units would be noticed"


def test_offloaded_parameters_free_as_much_memory_as_with_stock(trained: TrainingOnce) -> None:
    stock, *answers = trained.answers(1)[0]
    assert stock["freed_by_offload_bytes"] > 16 * ROUNDING_BYTES, "the parameters would be noticed"
    for found in answers:
        freed_bytes = found["freed_by_offload_bytes"] - found["given_back_bytes"]
        assert freed_bytes >= stock["freed_by_offload_bytes"] - ROUNDING_BYTES, found["block"]
        assert found["taken_by_reload_bytes"] <= stock["taken_by_reload_bytes"] + ROUNDING_BYTES, found["block"]


def test_offloaded_parameters_give_the_memory_of_the_planner_back(trained: TrainingOnce) -> None:
    planned = trained.answers(1)[0][-1]
    assert planned["given_back_bytes"] > 16 * ROUNDING_BYTES
