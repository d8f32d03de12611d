"""Check that writes to parameters of split masters leave the bits of stock, or end the training with an error."""

from __future__ import annotations

import pytest

from tests.software_gpu.split_writes_ranks import (
    ADVERSARIES,
    BEGUN,
    BLOCKS,
    KNOWN,
    READS,
    training_case,
    write_cases,
)
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
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_random_write_to_a_partition_is_noticed_or_forgotten_as_by_stock(
    world_size: int, trained: TrainingOnce
) -> None:
    """Check all steps, the last one, too: what is read after it is right, or the read itself raises the error."""
    cases = list(write_cases(training_case(world_size)))
    answers = [[one for one in by_rank if one["kind"] == "unknown"] for by_rank in trained.answers(world_size)]
    for case, found in zip(cases, zip(*answers, strict=True), strict=True):
        assert [one["label"] for one in found] == [str(case)] * world_size
        assert all(one["differences"] == [] for one in found), found
        changed, errors = "".join(one["changed"] for one in found), [one["error"] for one in found]
        if any(errors):
            (named,) = (error for error in errors if "no code but the update may write" in error)
            assert changed, found
            assert changed in named, found
            assert all(error is named or "the message of that rank has the cause" in error for error in errors), found
    noticed = sum(bool(one["error"]) for one in answers[0])
    assert len(cases) // 4 < noticed < len(cases), "some are of units that the CPU updates"


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_some_writes_are_found_by_the_last_update_itself(world_size: int, trained: TrainingOnce) -> None:
    case = training_case(world_size)
    labels = {str(one) for one in write_cases(case) if one.time == BEGUN and one.at == case.steps - 1}
    found = [one for by_rank in trained.answers(world_size) for one in by_rank if one["label"] in labels]
    assert len(found) == len(labels) * world_size >= 2 * len(READS) * world_size
    assert any("in the last update" in one["error"] for one in found)
