"""Check that users' writes and reads on the device have the bits of stock, with several ranks."""

from __future__ import annotations

import pytest

from tests.software_gpu.user_access_ranks import ADVERSARIES
from tests.zero.training_once import ProgramRanks, TrainingOnce, on_one_worker

RANKS = ProgramRanks("tests.software_gpu.user_access_ranks", timeout_s=200)
WORLD_SIZES = [pytest.param(2, marks=on_one_worker(RANKS.program, 2))]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_next_forward_on_the_device_uses_what_one_rank_has_written(world_size: int, trained: TrainingOnce) -> None:
    for answers in trained.answers(world_size):
        assert len(answers) == 4 * len(ADVERSARIES)
        for found in answers:
            assert found["written"] == [], f"{found['placement']}, {found['adversary']}"


@pytest.mark.promise("P1")
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_parameters_that_are_gathered_together_with_those_of_an_older_model_have_the_bits_of_stock(
    world_size: int, trained: TrainingOnce
) -> None:
    for answers in trained.answers(world_size):
        for found in answers:
            assert found["with teacher"] == [], f"{found['placement']}, {found['adversary']}"


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_gradient_partitions_are_host_tensors_with_the_bits_of_stock_in_every_placement(
    world_size: int, trained: TrainingOnce
) -> None:
    for answers in trained.answers(world_size):
        for found in answers:
            label = f"{found['placement']}, {found['adversary']}"
            assert found["devices of gradients"] == ["cpu"], label
            assert found["gradients"] == [], label
