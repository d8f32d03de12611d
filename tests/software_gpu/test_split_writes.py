"""Check that writes to parameters of split masters leave the bits of stock, or end the training with an error."""

from __future__ import annotations

import pytest

from tests.software_gpu.split_writes_ranks import ADVERSARIES, BLOCKS, KNOWN, PLACEMENTS, SEEDS
from tests.zero.training_once import ProgramRanks, TrainingOnce, on_one_worker

RANKS = ProgramRanks("tests.software_gpu.split_writes_ranks", timeout_s=900)
WORLD_SIZES = [pytest.param(size, marks=on_one_worker(RANKS.program, size)) for size in (1, 2)]


@pytest.mark.promise("P1")
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_what_the_interfaces_of_deepspeed_write_is_forgotten_or_kept_as_by_stock(
    world_size: int, trained: TrainingOnce
) -> None:
    for answers in trained.answers(world_size):
        known = [found for found in answers if found["kind"] == "known"]
        assert len(known) == len(KNOWN) * len(BLOCKS) * len(ADVERSARIES)
        for found in known:
            assert found["differences"] == [], found["label"]


@pytest.mark.promise("P1", "P6")
@pytest.mark.parametrize("world_size", WORLD_SIZES[:1])
def test_every_random_write_to_a_partition_is_noticed_or_forgotten_as_by_stock(
    world_size: int, trained: TrainingOnce
) -> None:
    (answers,) = trained.answers(world_size)
    unknown = [found for found in answers if found["kind"] == "unknown"]
    assert len(unknown) == SEEDS * sum(map(len, PLACEMENTS.values()))
    for found in unknown:
        if found["error"]:
            assert found["changed"], f"{found['label']}: {found['error']}"
            assert found["changed"] in found["error"], found["label"]
            assert "no code but the update may write" in found["error"]
        else:
            assert found["differences"] == [], found["label"]
    noticed = sum(bool(found["error"]) for found in unknown)
    assert len(unknown) // 4 < noticed < len(unknown), "some are of units that the CPU updates"
