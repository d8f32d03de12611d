"""Check that users' writes and reads on the device have the bits of stock, with several ranks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.software_gpu.user_access_ranks import ADVERSARIES
from tests.zero.training_once import ProgramRanks, TrainingOnce, on_one_worker

RANKS = ProgramRanks("tests.software_gpu.user_access_ranks", timeout_s=200)
WORLD_SIZES = [pytest.param(2, marks=on_one_worker(RANKS.program, 2))]


def answers_of_all_ranks(trained: TrainingOnce, world_size: int) -> list[dict[str, Any]]:
    """Return the answers for the four placements and all adversaries of each rank."""
    by_rank = [[found for found in answers if "placement" in found] for answers in trained.answers(world_size)]
    assert [len(answers) for answers in by_rank] == [4 * len(ADVERSARIES)] * world_size
    return [found for answers in by_rank for found in answers]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_next_forward_on_the_device_uses_what_one_rank_has_written(world_size: int, trained: TrainingOnce) -> None:
    for found in answers_of_all_ranks(trained, world_size):
        assert found["written"] == [], f"{found['placement']}, {found['adversary']}"


@pytest.mark.promise("P1")
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_parameters_that_are_gathered_together_with_those_of_an_older_model_have_the_bits_of_stock(
    world_size: int, trained: TrainingOnce
) -> None:
    for found in answers_of_all_ranks(trained, world_size):
        assert found["with teacher"] == [], f"{found['placement']}, {found['adversary']}"


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_an_abandoned_backward_leaves_no_gradient_behind(world_size: int, trained: TrainingOnce) -> None:
    for answers in trained.answers(world_size):
        by_adversary = {one["adversary"]: one["after abandoned"] for one in answers if "after abandoned" in one}
        assert by_adversary == {adversary: [] for adversary in ADVERSARIES}


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_gradient_partitions_are_host_tensors_with_the_bits_of_stock_in_every_placement(
    world_size: int, trained: TrainingOnce
) -> None:
    for found in answers_of_all_ranks(trained, world_size):
        label = f"{found['placement']}, {found['adversary']}"
        assert found["devices of gradients"] == ["cpu"], label
        assert found["gradients"] == [], label
